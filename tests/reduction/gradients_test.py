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


@pytest.mark.parametrize(
    "gradient, rows",
    [
        (tf.ones([3, 2]), [-2, -2, -2]),
        (tf.IndexedSlices(tf.ones([1, 2]), tf.constant([2])), [0, 0, -2]),
    ],
)
def test_the_same_tensor_on_all_replicas_eagerly(gradient, rows):
    [values] = steps.stepped(
        lambda: tf_xshard.CrossShardOptimizer(
            SGD(1.0), "sum", loss_normalization="replica"
        ),
        lambda r: [gradient],
        [np.zeros([3, 2])],
        num_replicas=2,
        graph=False,
    )
    for value in values:
        np.testing.assert_array_equal(value, np.transpose([rows, rows]))


@pytest.mark.parametrize(
    "convert, graph, make",
    replicas.in_turn(
        [tuple, list, np.array, tf.constant],
        [True, False],
        [
            lambda: tf_xshard.CrossShardOptimizer(SGD(1.0)),
            lambda: tf_xshard.TowerOptimizer(SGD(1.0), 1),
            lambda: tf_xshard.AGNOptimizer(SGD(1.0), communication_period=1),
        ],
    ),
)
def test_slices_of_anything_that_converts_to_tensors(convert, graph, make):
    slices = tf.IndexedSlices(
        np.ones([2, 2], "float32"), convert([2, 2]), convert([3, 2])
    )
    [values] = steps.stepped(
        make,
        lambda r: [slices],
        [np.zeros([3, 2])],
        num_replicas=2,
        graph=graph,
    )
    for value in values:
        assert value.tolist() == [[0, 0], [0, 0], [-4, -4]]


def test_slices_without_rows_or_a_shape():
    table = keras.Variable(np.zeros([3, 2], "float32"))
    optimizer = tf_xshard.CrossShardOptimizer(SGD(1.0))
    empty = tf.IndexedSlices(np.ones([0, 2], "float32"), ())
    optimizer.apply([empty], [table])
    optimizer.apply([tf.IndexedSlices(np.ones([1, 2]), [1])], [table])
    assert table.numpy().tolist() == [[0, 0], [-1, -1], [0, 0]]


def test_a_tower_makes_indices_unique_once():
    """A second look at what is unique costs an operation each step."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        table = keras.Variable(np.zeros([4, 2], "float32"))
        optimizer = tf_xshard.TowerOptimizer(SGD(1.0), 1)
        optimizer.build([table])
    rows = tf.IndexedSlices(tf.ones([2, 2]), [3, 3], [4, 2])
    step = replicas.applying(strategy, optimizer, lambda r: [rows], [table])
    graph = step.get_concrete_function().graph.as_graph_def()
    nodes = [
        *graph.node,
        *(n for f in graph.library.function for n in f.node_def),
    ]
    # For each replica: as they arrive, and after rows have been gathered.
    assert sum(node.op == "Unique" for node in nodes) == 2 * 2
    step()
    for value in replicas.values(strategy, table):
        assert value[3].tolist() == [-4.0, -4.0]


@pytest.mark.parametrize("hook", ["pre_reduce", "post_reduce"])
def test_a_hook_that_repeats_rows(hook):
    """Momenta of squares would take each repetition by itself."""

    def twice(pairs):
        return [
            (
                tf.IndexedSlices(
                    tf.concat([slices.values] * 2, 0),
                    tf.concat([slices.indices] * 2, 0),
                    slices.dense_shape,
                ),
                variable,
            )
            for slices, variable in pairs
        ]

    table, expected = (keras.Variable(np.ones([3, 1])) for _ in range(2))
    tf_xshard.CrossShardOptimizer(
        keras.optimizers.RMSprop(0.1), **{hook: twice}
    ).apply([tf.IndexedSlices([[1.0]], [1], [3, 1])], [table])
    keras.optimizers.RMSprop(0.1).apply([[[0.0], [2.0], [0.0]]], [expected])
    np.testing.assert_allclose(table.numpy(), expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    "hook, clip",
    [
        ("pre_reduce", tf_xshard.clip_by_norm),
        ("post_reduce", tf_xshard.clip_by_global_norm),
    ],
)
def test_float64_is_clipped_with_all_its_digits(hook, clip):
    """0.1 has 8 digits in float32."""
    [values] = steps.stepped(
        lambda: tf_xshard.CrossShardOptimizer(SGD(1.0), **{hook: clip(0.1)}),
        lambda r: [tf.constant([3.0, 4.0], "float64") / 3],
        [np.zeros(2)],
        num_replicas=3,
        dtype="float64",
    )
    for value in values:
        np.testing.assert_allclose(value, [-0.06, -0.08], rtol=1e-14)


def test_the_reduced_gradient_is_clipped():
    """All variables together; each replica's own would be clipped more."""
    found = steps.stepped(
        lambda: tf_xshard.CrossShardOptimizer(
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


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "Adagrad", "Ftrl"])
def test_rows_that_occur_twice_are_logged_once(name, monkeypatch):
    """limits_test.py has the numbers."""
    whole._log_summed_rows.cache_clear()
    logged = []
    monkeypatch.setattr(
        whole.logging, "warning", lambda text, *args: logged.append(args)
    )
    values = tf.constant([[1.0], [2.0], [4.0]])
    slices = tf.IndexedSlices(values, [0, 2, 0], [3, 1])
    for one, times in ((name, 2), ("SGD", 1)):
        optimizer = tf_xshard.CrossShardOptimizer(
            getattr(keras.optimizers, one)(0.1)
        )
        variable = keras.Variable(np.ones([3, 1]))
        for _ in range(times):
            optimizer.apply([slices], [variable])
        assert logged == [(name,)]
