"""`group_reduce`, on every strategy, against NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import seeds
from tests.support import steps
from tests.support import training
from tf_xshard.multi_worker import local_cluster

GROUPS = [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    "kind, graph, reduction",
    [
        ("mirrored", True, "mean"),
        ("mirrored", False, "sum"),
        ("multi_worker", True, "sum"),
        ("multi_worker", False, "mean"),
        ("tpu", True, "mean"),
        ("tpu_permuted", True, "sum"),
    ],
)
def test_nested_values(kind, graph, reduction):
    """Dense values and rows; an overflow stays in its group."""
    gathers = kind == "mirrored" or (kind == "multi_worker" and graph)

    def on_replica():
        x = tf.fill([2], replicas.power_of_ten())
        rows = tf.IndexedSlices([x, 2 * x, 4 * x], [1, 1, 2], [3, 2])
        bad = tf.where(x > 500, np.inf, x)
        one = tf_xshard.group_reduce({"a": [x, None]}, None, reduction)
        assert one["a"][1] is None
        bad, rows = tf_xshard.group_reduce([bad, rows], GROUPS, reduction)
        assert isinstance(rows, tf.IndexedSlices) == gathers
        if gathers:  # Each row is there once.
            tf.debugging.assert_equal(tf.size(rows.indices), 2)
        return one["a"][0], bad, tf.convert_to_tensor(rows)

    strategy = replicas.STRATEGIES[kind](4)
    one, bad, rows = steps.run(strategy, on_replica, graph)
    combine = getattr(np, reduction)
    for members in GROUPS:
        want = combine([10.0**m for m in members])
        for r in members:
            for got, expected in (
                (one[r], [combine([1, 10, 100, 1000])] * 2),
                (bad[r], [np.inf if 3 in members else want] * 2),
                (rows[r], np.outer([0, 3, 4], [want] * 2)),
            ):
                np.testing.assert_allclose(got, expected)


def test_8_bit_integers():
    """The mean of replicas whose values are one and three times these."""
    numbers = np.float32([1, 2, 127])
    int8 = tf_xshard.Communication("int8")

    def on_replica():
        own = tf.constant(numbers * (1 + 2 * replicas.replica_id()))
        return tf_xshard.group_reduce(own, communication=int8)

    for value in steps.run(replicas.mirrored(2), on_replica):
        np.testing.assert_allclose(value, 2 * numbers, rtol=1e-6)


def test_nothing_to_reduce():
    """Without a strategy, or without a value."""
    assert float(tf_xshard.group_reduce(3.0)) == 3.0
    assert tf_xshard.group_reduce([None]) == [None]
    assert replicas.mirrored(2).run(tf_xshard.group_reduce, ([None],)) == [None]


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((1.0, [[0, 1]]), ValueError, "is for 2 replicas"),
        ((1.0, None, "max"), ValueError, '"mean" or "sum", got .max.'),
        ((1,), TypeError, r"group_reduce\(\) reduces.* value_0 has type int32"),
        (([1.0, True],), TypeError, "value_1 has type bool"),
        ((1j,), TypeError, "value_0 has type complex128"),
        (
            (tf.IndexedSlices([[1.0]], [0]),),
            ValueError,
            "known shapes, but value_0 .* dense_shape",
        ),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        tf_xshard.group_reduce(*arguments)
    with pytest.raises(TypeError, match="must be a tf_xshard.Communication"):
        tf_xshard.group_reduce(1.0, communication="bfloat16")


@pytest.mark.parametrize(
    "own, graph, text",
    [
        (lambda r: [1.0] * (1 + r), True, "All replicas must"),
        (lambda r: tf.ones([2 + r]), False, r"shapes \['\(2,\)', '\(3,\)'\]"),
        (
            *(lambda r: [None, 1.0] if r else [1.0, None], False),
            r"values together: \['value_0', 'value_1'\]",
        ),
        (lambda r: tf.ones([2], f"float{32 + 32 * r}"), True, "different type"),
    ],
    ids=["structure", "size", "None", "dtype"],
)
def test_replicas_with_different_values(own, graph, text):
    """At once: a collective would wait until the timeout."""
    strategy = replicas.mirrored(2)
    of_replica = lambda: tf_xshard.group_reduce(own(replicas.replica_id()))
    with pytest.raises(ValueError, match=text):
        steps.run(strategy, of_replica, graph)
    # Collectives still work.
    same = lambda: tf_xshard.group_reduce(tf.ones([2]))
    for value in steps.run(strategy, same, graph):
        assert value.numpy().tolist() == [1, 1]


@pytest.mark.parametrize(
    "kind, graph, reduction",
    [
        ("mirrored", False, "mean"),
        ("mirrored", True, "sum"),
        ("tpu", True, "mean"),
        ("tpu_permuted", True, "sum"),
    ],
)
def test_its_gradient_reduces_the_upstream_gradients(kind, graph, reduction):
    """Of dense values and of rows; of a value without an upstream, 0."""

    def on_replica():
        r = tf.cast(replicas.replica_id_tensor(), tf.float32)
        x = tf.fill([2], replicas.power_of_ten())
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = tf.IndexedSlices([x, 2 * x, 3 * x], [1, 0, 1], [3, 2])
            dense, _, rows = tf_xshard.group_reduce(
                [x, 5 * x, rows], GROUPS, reduction
            )
            weights = tf.constant([[100.0], [1000.0], [10.0]])
            of_rows = tf.reduce_sum(weights * tf.convert_to_tensor(rows))
            # tf.gather has sparse gradients.
            of_dense = tf.reduce_sum(tf.gather(dense, [1, 0]) ** 2)
            loss = (r + 1) * (of_dense + of_rows)
        return tape.gradient(loss, x)

    got = steps.run(replicas.STRATEGIES[kind](4), on_replica, graph)
    combine = getattr(np, reduction)
    for members in GROUPS:
        reduced = combine([10.0**r for r in members])
        # 4 x have the weight 1000, and 2 x the weight 100.
        upstream = combine([(r + 1) * (2 * reduced + 4200) for r in members])
        for r in members:
            np.testing.assert_allclose(got[r], [upstream] * 2, rtol=1e-6)


def test_the_gradient_of_its_gradient():
    strategy = replicas.mirrored(2)

    def on_replica():
        x = tf.constant([1.0, 3.0][replicas.replica_id()])
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf_xshard.group_reduce(x, reduction="sum") ** 3
            # 2 * 3 * (1 + 3)^2 on each replica.
            first = tape.gradient(loss, x)
        return first, outer.gradient(first, x)

    for graph in (True, False):
        # The second: of the sum of both first ones, 4 * 6 * (1 + 3).
        for values in steps.run(strategy, on_replica, graph):
            assert [float(one) for one in values] == [96, 96]


def _loss_with_a_mean(y, p):
    mean = tf_xshard.group_reduce(tf.reduce_mean(p))
    return tf.square(p - y - mean)[:, 0]


class _MinusMean(keras.layers.Layer):
    """Subtracts the mean over all replicas."""

    def call(self, x):
        return x - tf_xshard.group_reduce(tf.reduce_mean(x, 0))


def _with_a_mean():
    seeds.seed(1)
    return keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(2, "tanh"),
            _MinusMean(),
            keras.layers.Dense(1),
        ]
    )


def test_in_fit():
    """In a layer and in a loss, which Keras also calls for shapes."""
    x = np.linspace(-1, 2, 48, dtype="float32").reshape(16, 3)
    (_, expected), (_, got) = (
        training.train(
            lambda wrap=wrap: wrap(keras.optimizers.SGD(0.1)),
            strategy,
            (x, x[:, :1] ** 2),
            batch_size=8,
            num_steps=2,
            model_fn=_with_a_mean,
            loss=_loss_with_a_mean,
        )
        for strategy, wrap in (
            (None, lambda one: one),
            (replicas.mirrored(2), tf_xshard.CrossShardOptimizer),
        )
    )
    assert training.deviation(got, expected) <= 1e-6


def test_it_keeps_no_graph():
    def on_replica():
        with tf.GradientTape() as tape:
            x = tf.ones([2])
            tape.watch(x)
            value = tf_xshard.group_reduce(x)
        return tape.gradient(value, x)

    steps.check_no_graph_is_kept(on_replica)


def test_outside_of_run(monkeypatch):
    with (
        replicas.mirrored(2).scope(),
        pytest.raises(
            RuntimeError, match="cross-replica context.*Call it in the function"
        ),
    ):
        tf_xshard.group_reduce(1.0)
    addresses = local_cluster.local_addresses(2)
    monkeypatch.setenv("TF_CONFIG", local_cluster.tf_config(addresses, 1))
    with pytest.raises(
        ValueError,
        match=r"each of the 2 processes.*that you pass to strategy.run",
    ):
        tf_xshard.group_reduce(1.0)
    with pytest.raises(RuntimeError, match="its MirroredStrategy has only"):
        replicas.mirrored(2).run(tf_xshard.group_reduce, (1.0,))
    # Making a model communicates nothing.
    x = keras.Input((3,))
    assert _MinusMean()(x).shape == (None, 3)
