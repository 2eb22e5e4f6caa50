"""Gradients of every type that plain Keras takes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tf_xshard.optimizers.update import whole

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


def test_the_reduced_gradient_is_clipped_as_by_the_inner_optimizer():
    """Both together; that of each replica alone would be clipped more."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        pairs = [
            [keras.Variable(np.zeros(2, "float32")) for _ in range(2)]
            for _ in range(2)
        ]
        ours = tf_xshard.CrossShardOptimizer(
            SGD(1.0), "sum", post_reduce=tf_xshard.clip_by_global_norm(2.0)
        )
        inner = tf_xshard.CrossShardOptimizer(
            SGD(1.0, global_clipnorm=2.0), "sum"
        )
    for optimizer, variables in zip((ours, inner), pairs, strict=True):
        replicas.apply_once(
            strategy,
            optimizer,
            lambda r: [tf.constant([3.0, -r]), tf.constant([-1.0 * r, 4.0])],
            variables,
        )
    summed = 2 * np.array([[6.0, -1.0], [-1.0, 8.0]])
    expected = -2 * summed / np.linalg.norm(summed)
    for variables in pairs:
        for row, variable in zip(expected, variables, strict=True):
            for value in replicas.values(strategy, variable):
                np.testing.assert_allclose(value, row, rtol=1e-6)


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "Adagrad", "Ftrl"])
def test_rows_that_occur_twice_are_logged_once(name, monkeypatch):
    """And the result is that of the dense gradient, which plain Keras has."""
    whole._log_summed_rows.cache_clear()
    logged = []
    monkeypatch.setattr(
        whole.logging, "warning", lambda text, *args: logged.append(args)
    )
    optimizer_class = getattr(keras.optimizers, name)
    slices = tf.IndexedSlices(
        tf.constant([[1.0], [2.0], [4.0]]), tf.constant([0, 2, 0]), (3, 1)
    )
    ours, dense, sparse = (keras.Variable(np.ones([3, 1])) for _ in range(3))
    wrapper = tf_xshard.CrossShardOptimizer(optimizer_class(0.1))
    dense_optimizer, plain = optimizer_class(0.1), optimizer_class(0.1)
    for _ in range(2):
        wrapper.apply([slices], [ours])
        dense_optimizer.apply([tf.constant([[5.0], [0.0], [2.0]])], [dense])
        plain.apply(
            [tf.IndexedSlices(slices.values, slices.indices, [3, 1])], [sparse]
        )
    np.testing.assert_allclose(ours.numpy(), dense.numpy(), rtol=1e-6)
    assert np.abs(sparse.numpy() - dense.numpy()).max() > 1e-3
    assert logged == [(name,)]
    tf_xshard.CrossShardOptimizer(keras.optimizers.SGD()).apply(
        [slices], [keras.Variable(np.ones([3, 1]))]
    )
    assert logged == [(name,)]
