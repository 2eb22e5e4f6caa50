"""Gradients of every type that plain Keras takes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas

SGD = keras.optimizers.SGD


@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_same_tensor_on_all_replicas_eagerly(is_sparse):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(np.zeros([3, 2], "float32"))
        optimizer = tf_xshard.CrossShardOptimizer(
            SGD(1.0), "sum", loss_normalization="replica"
        )
    gradient = tf.ones([3, 2])
    if is_sparse:
        gradient = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([2]))
    strategy.run(lambda: optimizer.apply([gradient], [weight]))
    rows = [0, 0, 2] if is_sparse else [2, 2, 2]
    for value in replicas.values(strategy, weight):
        np.testing.assert_array_equal(value, -np.repeat([rows], 2, 0).T)


@pytest.mark.parametrize("convert", [tuple, list, np.array, tf.constant])
@pytest.mark.parametrize("graph", [True, False], ids=["function", "eager"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: tf_xshard.CrossShardOptimizer(SGD(1.0)),
        lambda: tf_xshard.TowerOptimizer(SGD(1.0), 1),
        lambda: tf_xshard.AGNOptimizer(SGD(1.0), communication_period=1),
    ],
    ids=["cross", "tower", "agn"],
)
def test_slices_of_anything_that_converts_to_tensors(make, graph, convert):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        table = keras.Variable(np.zeros([3, 2], "float32"))
        optimizer = make()
    slices = tf.IndexedSlices(
        np.ones([2, 2], "float32"), convert([2, 2]), convert([3, 2])
    )
    replicas.apply_once(strategy, optimizer, lambda r: [slices], [table], graph)
    for value in replicas.values(strategy, table):
        assert value.tolist() == [[0, 0], [0, 0], [-4, -4]]


def test_slices_without_rows_or_a_shape():
    table = keras.Variable(np.zeros([3, 2], "float32"))
    optimizer = tf_xshard.CrossShardOptimizer(SGD(1.0))
    empty = tf.IndexedSlices(np.ones([0, 2], "float32"), ())
    optimizer.apply([empty], [table])
    optimizer.apply([tf.IndexedSlices(np.ones([1, 2]), [1])], [table])
    assert table.numpy().tolist() == [[0, 0], [-1, -1], [0, 0]]


@pytest.mark.parametrize("clip", ["clip_by_norm", "clip_by_global_norm"])
@pytest.mark.parametrize("hook", ["pre_reduce", "post_reduce"])
def test_float64_is_clipped_with_all_its_digits(hook, clip):
    """0.1 has 8 digits in float32."""
    strategy = replicas.mirrored(3)
    with strategy.scope():
        weight = keras.Variable(np.zeros(2), dtype="float64")
        optimizer = tf_xshard.CrossShardOptimizer(
            SGD(1.0), **{hook: getattr(tf_xshard, clip)(0.1)}
        )
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [tf.constant([3.0, 4.0], "float64") / 3],
        [weight],
    )
    for value in replicas.values(strategy, weight):
        np.testing.assert_allclose(value, [-0.06, -0.08], rtol=1e-14)
