"""Gradients of every type that plain Keras takes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import steps
from tf_xshard.optimizers.update import whole

SGD = keras.optimizers.SGD
CROSS = tf_xshard.CrossShardOptimizer


@pytest.mark.parametrize(
    "convert, graph, make",
    replicas.in_turn(
        [tuple, list, np.array, tf.constant],
        [True, False],
        [
            lambda: CROSS(SGD(1.0)),
            lambda: tf_xshard.TowerOptimizer(SGD(1.0), 1),
            lambda: CROSS(SGD(8.0, loss_scale_factor=8.0)),
            lambda: tf_xshard.AGNOptimizer(SGD(1.0), communication_period=1),
        ],
    ),
)
def test_slices_of_anything_that_converts_to_tensors(convert, graph, make):
    slices = tf.IndexedSlices(
        np.ones([2, 2], "float32"), convert([2, 2]), convert([3, 2])
    )
    ones = tf.ones([3, 2])
    # The same tensors on all replicas.
    sparse, dense = steps.stepped(
        make,
        lambda r: [slices, ones],
        [np.zeros([3, 2])] * 2,
        num_replicas=2,
        graph=graph,
    )
    for r in range(2):
        assert sparse[r].tolist() == [[0, 0], [0, 0], [-4, -4]]
        assert dense[r].tolist() == [[-2, -2]] * 3


def test_slices_without_rows_or_a_shape():
    table = keras.Variable(np.zeros([3, 2], "float32"))
    optimizer = CROSS(SGD(1.0))
    empty = tf.IndexedSlices(np.ones([0, 2], "float32"), ())
    optimizer.apply([empty], [table])
    optimizer.apply([tf.IndexedSlices(np.ones([1, 2]), [1])], [table])
    assert table.numpy().tolist() == [[0, 0], [-1, -1], [0, 0]]


@pytest.mark.parametrize("hook", ["pre_reduce", "post_reduce"])
def test_a_hook_that_repeats_rows(hook):
    """Momenta of squares would take each repetition by itself."""

    def twice(pairs):
        [(one, variable)] = pairs
        values, indices = (
            tf.concat([part] * 2, 0) for part in (one.values, one.indices)
        )
        again = tf.IndexedSlices(values, indices, one.dense_shape)
        return [(again, variable)]

    table, expected = (keras.Variable(np.ones([3, 1])) for _ in range(2))
    CROSS(keras.optimizers.RMSprop(0.1), **{hook: twice}).apply(
        [tf.IndexedSlices([[1.0]], [1], [3, 1])], [table]
    )
    keras.optimizers.RMSprop(0.1).apply([[[0.0], [2.0], [0.0]]], [expected])
    np.testing.assert_allclose(table.numpy(), expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    "options, expected",
    [
        # 0.1 has 8 digits in float32, and so has 1/3 of three replicas' sum.
        ({"pre_reduce": tf_xshard.clip_by_norm(0.1)}, [-0.06, -0.08]),
        ({"post_reduce": tf_xshard.clip_by_global_norm(0.1)}, [-0.06, -0.08]),
        ({"loss_normalization": "replica"}, [-1, -4 / 3]),
    ],
    ids=["pre_reduce", "post_reduce", "mean"],
)
def test_float64_keeps_all_its_digits(options, expected):
    """Of clipping, and of the mean of three replicas."""
    [values] = steps.stepped(
        lambda: CROSS(SGD(1.0), **options),
        lambda r: [tf.constant([3.0, 4.0], "float64") / 3],
        [np.zeros(2)],
        num_replicas=3,
        dtype="float64",
    )
    for value in values:
        np.testing.assert_allclose(value, expected, rtol=1e-14)


def test_the_reduced_gradient_is_clipped():
    """All variables together; each replica's own would be clipped more."""
    found = steps.stepped(
        lambda: CROSS(
            SGD(1.0), "sum", post_reduce=tf_xshard.clip_by_global_norm(2.0)
        ),
        lambda r: [tf.constant([3.0, -r]), tf.constant([-1.0 * r, 4.0])],
        [np.zeros(2), np.zeros(2)],
        num_replicas=2,
    )
    summed = 2 * np.array([[6.0, -1.0], [-1.0, 8.0]])
    expected = -2 * summed / np.linalg.norm(summed)
    for row, values in zip(expected, found, strict=True):
        for value in values:
            np.testing.assert_allclose(value, row, rtol=1e-6)


def test_rows_that_occur_twice_are_logged_once(caplog):
    """Not for SGD. oracle_test.py has the numbers."""
    whole._log_summed_rows.cache_clear()
    slices = tf.IndexedSlices(tf.ones([3, 1]), [0, 2, 0], [3, 1])
    for name in ("Adam", "Adam", "SGD", "Ftrl"):
        optimizer = CROSS(getattr(keras.optimizers, name)(0.1))
        optimizer.apply([slices], [keras.Variable(np.ones([3, 1]))])
    assert [one.args for one in caplog.records] == [("Adam",), ("Ftrl",)]
