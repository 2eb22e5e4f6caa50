"""A row that occurs several times in a batch, as in an Embedding."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard


@pytest.mark.parametrize(
    "name", ["Adam", "RMSprop", "Adagrad", "Ftrl", "Nadam", "AdamW"]
)
def test_an_embedding_is_one_hot_rows_and_a_dense_layer(name):
    """Plain Keras differs if a row occurs twice in a batch."""
    rows = np.array([0, 2, 2, 2, 1, 0, 2, 2])
    rng = np.random.default_rng(1)
    table = rng.normal(size=(4, 3)).astype("float32")
    values = rng.normal(size=(8, 3)).astype("float32")

    def trained(is_sparse, wrap):
        weight = keras.Variable(table)
        optimizer = wrap(getattr(keras.optimizers, name)(0.1))
        for step in range(3):
            gradient = tf.IndexedSlices(values + step, rows, [4, 3])
            if not is_sparse:
                gradient = tf.convert_to_tensor(gradient)
            optimizer.apply([gradient], [weight])
        return weight.numpy()

    expected = trained(False, lambda inner: inner)
    got = trained(True, tf_xshard.CrossShardOptimizer)
    np.testing.assert_allclose(got, expected, atol=1e-6)
