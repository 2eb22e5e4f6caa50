"""Limits of Keras that the pages name are true."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas

X = np.random.default_rng(0).normal(size=(9, 3)).astype("float32")


class NoCall(keras.Model):
    """A subclassed model without `call`."""


@pytest.mark.full
@pytest.mark.parametrize(
    "make, x, error, message",
    [
        (lambda: _dense("float32"), X, tf.errors.OpError, "must have the same"),
        (lambda: _dense("bool"), X[:8] > 0, tf.errors.OpError, "'T' of bool"),
        (NoCall, X[:8], RuntimeError, "Unable to automatically build"),
    ],
    ids=["first_batch", "bool", "no_call"],
)
def test_fits_that_keras_refuses(make, x, error, message):
    with replicas.mirrored(2).scope():
        model = make()
        model.compile(
            tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(0.1)), "mse"
        )
    with pytest.raises(error, match=message):
        model.fit(x, X[: len(x), :1], 9, verbose=0)


def _dense(dtype):
    return keras.Sequential(
        [keras.layers.Input((3,), dtype=dtype), keras.layers.Dense(1)]
    )


@pytest.mark.parametrize(
    "name", ["Adam", "RMSprop", "Adagrad", "Ftrl", "Nadam", "AdamW"]
)
def test_an_embedding_is_one_hot_rows_and_a_dense_layer(name):
    """Not so with plain Keras, if a row occurs twice in a batch."""
    rows = np.array([0, 2, 2, 2, 1, 0, 2, 2])
    table = np.random.default_rng(1).normal(size=(4, 3)).astype("float32")

    def trained(is_sparse, wrap):
        weight = keras.Variable(table)
        optimizer = wrap(getattr(keras.optimizers, name)(0.1))
        for step in range(3):
            gradient = tf.IndexedSlices(X[:8] + step, rows, [4, 3])
            if not is_sparse:
                gradient = tf.convert_to_tensor(gradient)
            optimizer.apply([gradient], [weight])
        return weight.numpy()

    expected = trained(False, lambda inner: inner)
    got = trained(True, tf_xshard.CrossShardOptimizer)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    # Keras mended this: change the limits of CrossShardOptimizer.
    plain = trained(True, lambda inner: inner)
    assert np.abs(plain - expected).max() > 1e-3
