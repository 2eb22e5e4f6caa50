"""`group_reduce`, on every strategy, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas

GROUPS = [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    "kind, reduction, groups",
    replicas.pairwise(
        list(replicas.STRATEGIES), ["mean", "sum"], [None, GROUPS]
    ),
    ids=str,
)
def test_nested_values(kind, reduction, groups):
    def on_replica(x):
        reduced = tf_xshard.group_reduce(
            {"a": [x, None], "b": 2 * x[0]}, groups, reduction
        )
        assert reduced["a"][1] is None
        return reduced["a"][0], reduced["b"]

    first, second = replicas.run(kind, on_replica)
    combine = getattr(np, reduction)
    for members in groups or [[0, 1, 2, 3]]:
        want = combine([10.0**r for r in members])
        for r in members:
            assert first[r] == [want, want] and second[r] == 2 * want


def test_slices_stay_slices_eagerly():
    def on_replica():
        r = replicas.replica_id()
        own = tf.IndexedSlices([[10.0**r]], [r % 2], [3, 1])
        [reduced] = tf_xshard.group_reduce([own], GROUPS, "sum")
        assert isinstance(reduced, tf.IndexedSlices)
        return tf.math.unsorted_segment_sum(reduced.values, reduced.indices, 3)

    values = replicas.mirrored(4).run(on_replica).values
    got = [v.numpy().ravel().tolist() for v in values]
    assert got == [[1, 1000, 0], [100, 10, 0], [100, 10, 0], [1, 1000, 0]]


@pytest.mark.parametrize(
    "devices, groups, graph",
    [
        (replicas.MIXED, [[3, 1], [0, 2]], True),
        (replicas.MIXED, [[3, 1], [0, 2]], False),
        (replicas.TWELVE, [[11, 4, 2, 9, 0, 7], [3, 1, 10, 5, 8, 6]], True),
        (replicas.TWELVE, None, True),
        (replicas.SIXTEEN, None, True),
    ],
    ids=str,
)
def test_devices_in_any_order_and_number(devices, groups, graph):
    """Dense values and slices, whose numbers of rows differ by replica."""

    def on_replica():
        r = replicas.replica_id()
        rows = [r % 3] * (1 + r % 2)
        own = tf.IndexedSlices([[2.0**r]] * len(rows), rows, [3, 1])
        dense, slices = tf_xshard.group_reduce(
            [tf.constant(2.0**r), own], groups, "sum"
        )
        return dense, tf.convert_to_tensor(slices)

    run = lambda: replicas.mirrored_on(devices).run(on_replica)
    dense, slices = (tf.function(run, autograph=False) if graph else run)()
    for members in groups or [range(len(devices))]:
        rows = np.zeros(3)
        np.add.at(
            rows,
            [r % 3 for r in members],
            [(1 + r % 2) * 2.0**r for r in members],
        )
        for r in members:
            assert dense.values[r] == sum(2.0**m for m in members)
            assert slices.values[r].numpy().ravel().tolist() == rows.tolist()


@pytest.mark.parametrize("kind", ["mirrored", "tpu"])
def test_rows_that_occur_several_times(kind):
    """Slices have each once; on a TPU the result is dense."""

    def on_replica(x):
        own = tf.IndexedSlices([x, 2 * x, 4 * x], [1, 1, 2], [3, 2])
        reduced = tf_xshard.group_reduce(own, GROUPS, "sum")
        assert isinstance(reduced, tf.IndexedSlices) == (kind == "mirrored")
        if kind == "tpu":
            return reduced, tf.constant([0, 1, 2])
        return tf.convert_to_tensor(reduced), reduced.indices

    values, rows = replicas.run(kind, on_replica)
    for members in GROUPS:
        x = sum(10.0**r for r in members)
        for r in members:
            assert values[r] == [[0, 0], [3 * x] * 2, [4 * x] * 2]
            assert len(set(rows[r])) == len(rows[r])


def test_without_a_strategy_it_returns_the_values():
    assert float(tf_xshard.group_reduce(3.0)) == 3.0
    assert tf_xshard.group_reduce([None]) == [None]


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
    "own, text, is_eager",
    [
        (lambda r: [1.0] * (1 + r), "All replicas must", False),
        (lambda r: tf.ones([2 + r]), r"shapes \['\(2,\)', '\(3,\)'\]", True),
        (
            lambda r: tf.IndexedSlices([[1.0]], [0], [2 + r, 1]),
            r"shapes \['\(2, 1\)', '\(3, 1\)'\]",
            False,
        ),
        (lambda r: tf.ones([2, 1][: 1 + r]), "different shapes", False),
        (
            lambda r: [None, 1.0] if r else [1.0, None],
            r"values together: \['value_0', 'value_1'\]",
            True,
        ),
        (
            lambda r: tf.ones([2], ["float32", "float64"][r]),
            "different types",
            False,
        ),
    ],
    ids=["structure", "size", "slices", "rank", "None", "dtype"],
)
def test_replicas_with_different_values(own, text, is_eager):
    """At once: a collective would wait until the timeout."""
    strategy = replicas.mirrored(2)

    def step(own=own):
        return strategy.run(
            lambda: tf_xshard.group_reduce(own(replicas.replica_id()))
        )

    with pytest.raises(ValueError, match=text):
        (step if is_eager else tf.function(step))()
    # Collectives still work.
    same = lambda _: tf.ones([2])
    result = step if is_eager else tf.function(lambda: step(same))
    values = result(same) if is_eager else result()
    assert [list(one.numpy()) for one in values.values] == [[1, 1]] * 2


def test_cross_replica_context():
    strategy = replicas.mirrored(2)
    with (
        strategy.scope(),
        pytest.raises(RuntimeError, match="cross-replica context"),
    ):
        tf_xshard.group_reduce(1.0)
