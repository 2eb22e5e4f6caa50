"""The operations that TPUStrategy traces. Nothing here is executed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tf_xshard.collectives import cross_replica_sum

NUM_REPLICAS = 4


def _trace(groups, kind="tpu", sparse=False, dtype="float32", **kwargs):
    """Shape and groups of every CrossReplicaSum, and of no other operation."""
    strategy = replicas.STRATEGIES[kind](NUM_REPLICAS)
    with strategy.scope():
        variables = [
            keras.Variable(np.zeros([3, 2]), dtype=dtype),
            keras.Variable(0.0, dtype=dtype),
        ]
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.Adam(), group_assignment=groups, **kwargs
        )
        optimizer.build(variables)

    def on_replica():
        first = tf.ones([3, 2], dtype)
        if sparse:
            first = tf.IndexedSlices(
                tf.ones([2, 2]), tf.constant([0, 0]), tf.constant([3, 2])
            )
        optimizer.apply([first, tf.constant(1.0, dtype)], variables)

    with strategy.capture() as extractions:
        tf.function(lambda: strategy.run(on_replica)).get_concrete_function()
    [extraction] = extractions
    graph_def = extraction.program.graph_def
    nodes = [
        *graph_def.node,
        *(n for f in graph_def.library.function for n in f.node_def),
    ]
    by_name = {node.name: node for node in nodes}
    sums = []
    for node in nodes:
        # A CrossReplicaSum, as XLA names it, with the same inputs.
        if node.op == "XlaAllReduce":
            assert node.attr["mode"].s == b"CrossReplica"
            groups_of = by_name[node.input[1]].attr["value"].tensor
            [shape] = node.attr["_output_shapes"].list.shape
            sizes = [dim.size for dim in shape.dim]
            sums.append((sizes, tf.make_ndarray(groups_of).tolist()))
        # A custom call stands for an AllToAll: the step counter of plain Keras.
        assert node.op not in ("XlaCustomCallV2", "CollectiveReduceV2")
    return sums


@pytest.mark.parametrize(
    "groups, sparse",
    [
        (None, False),
        ([[2, 0], [1, 3]], True),
        ([[0, 1], [2, 3]], False),
        ([[0], [1], [2], [3]], True),
    ],
    ids=["all", "shuffled", "contiguous", "alone"],
)
def test_one_native_sum_per_gradient(groups, sparse):
    """None in groups of one."""
    sums = _trace(groups, sparse=sparse)
    is_alone = groups is not None and len(groups) == NUM_REPLICAS
    shapes = [] if is_alone else [[3, 2], []]
    assert sums == [(shape, groups or [[0, 1, 2, 3]]) for shape in shapes]


def test_groups_without_a_device_assignment_travel_as_a_stack(monkeypatch):
    """The log says once how to get the fast path."""
    lines = []
    monkeypatch.setattr(cross_replica_sum.logging, "warning", lines.append)
    cross_replica_sum.warn_about_the_slow_path.cache_clear()
    for _ in range(2):
        sums = _trace([[2, 0], [1, 3]], kind="tpu_permuted")
        # One bucket of both gradients, one slot per group.
        assert sums == [([2, 7], [[0, 1, 2, 3]])]
    [line] = lines
    for name in (
        "tf.tpu.experimental.initialize_tpu_system",
        "tf.tpu.experimental.DeviceAssignment.build",
        "experimental_device_assignment",
    ):
        assert name in line
    cross_replica_sum.warn_about_the_slow_path.cache_clear()
    _trace([[2, 0], [1, 3]], kind="tpu")
    _trace(None, kind="tpu_permuted")
    assert len(lines) == 1


@pytest.mark.parametrize("kind", replicas.TPUS)
def test_a_type_that_a_tpu_can_not_sum(kind):
    for groups in (None, [[0, 1], [2, 3]]):
        with pytest.raises(ValueError, match="gradient of float64 can't be"):
            _trace(groups, kind=kind, dtype="float64")
    float32 = tf_xshard.Communication(dtype="float32")
    _trace(None, kind=kind, dtype="float64", communication=float32)
