"""What is traced under TPUStrategy. Nothing here runs on, or for, a TPU.

A real `tf.distribute.TPUStrategy` over a fabricated topology, whose variables
live on logical CPUs: the graph is TensorFlow's own.
"""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.tpu import device_assignment
from tensorflow.python.tpu import topology
from tensorflow.python.tpu import tpu_system_metadata

import tf_xshard

NUM_REPLICAS = 4
_PREFIX = "/job:localhost/replica:0/task:0/device:"


def _topology():
    return topology.Topology(
        mesh_shape=[2, 1, 1, 2],
        device_coordinates=np.array(
            [[[c, 0, 0, k] for c in range(2) for k in range(2)]], np.int32
        ),
    )


class _Resolver(tf.distribute.cluster_resolver.ClusterResolver):
    _tpu = "fabricated"
    environment = ""
    tpu_hardware_feature = None

    def get_tpu_system_metadata(self):
        devices = [
            session._DeviceAttributes(f"{_PREFIX}TPU:{i}", "TPU", 0, 0)
            for i in range(NUM_REPLICAS)
        ]
        return tpu_system_metadata.TPUSystemMetadata(
            num_cores=NUM_REPLICAS,
            num_hosts=1,
            num_of_cores_per_host=NUM_REPLICAS,
            topology=_topology(),
            devices=tuple(devices),
        )

    def cluster_spec(self):
        return tf.train.ClusterSpec({})

    def master(self, *args, **kwargs):
        return ""

    def num_accelerators(self, *args, **kwargs):
        return {"TPU": NUM_REPLICAS}


def _strategy(with_device_assignment):
    assignment = None
    if with_device_assignment:
        assignment = device_assignment.DeviceAssignment.build(
            _topology(), num_replicas=NUM_REPLICAS
        )
    strategy = tf.distribute.TPUStrategy(
        _Resolver(), experimental_device_assignment=assignment
    )
    extended = strategy.extended
    cpus = [f"{_PREFIX}CPU:{i}" for i in range(NUM_REPLICAS)]
    extended._tpu_devices = np.array([[cpu] for cpu in cpus], dtype=object)
    extended._host_device = cpus[0]
    for name, workers in (
        ("_device_input_worker_devices", cpus),
        ("_host_input_worker_devices", cpus[:1] * NUM_REPLICAS),
    ):
        setattr(extended, name, collections.OrderedDict({cpus[0]: workers}))
    return strategy


def _operations(graph):
    yield from graph.get_operations()
    for name in graph._functions:
        yield from graph._get_function(name).graph.get_operations()


def _trace(groups, with_device_assignment=True, inner=None, sparse=False):
    strategy = _strategy(with_device_assignment)
    with strategy.scope():
        variables = [keras.Variable(np.zeros([3, 2])), keras.Variable(0.0)]
        optimizer = tf_xshard.CrossShardOptimizer(
            inner() if inner else keras.optimizers.Adam(),
            group_assignment=groups,
        )
        optimizer.build(variables)

    @tf.function
    def step():
        def on_replica():
            first = tf.ones([3, 2])
            if sparse:
                first = tf.IndexedSlices(
                    tf.ones([2, 2]), tf.constant([0, 0]), tf.constant([3, 2])
                )
            optimizer.apply([first, tf.constant(1.0)], variables)

        strategy.run(on_replica)

    graph = step.get_concrete_function().graph
    counts = collections.Counter(op.type for op in _operations(graph))
    sums = [
        (op.outputs[0].shape.as_list(), tf.get_static_value(op.inputs[1]))
        for op in _operations(graph)
        if op.type == "CrossReplicaSum"
    ]
    return counts, sums


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    "groups",
    [None, [[2, 0], [1, 3]], [[0, 1], [2, 3]]],
    ids=["all", "shuffled", "contiguous"],
)
def test_one_native_sum_per_gradient(groups, sparse):
    counts, sums = _trace(groups, sparse=sparse)
    assert [shape for shape, _ in sums] == [[3, 2], []]
    for _, assignment in sums:
        assert assignment.tolist() == (groups or [[0, 1, 2, 3]])
    # The step counter of plain Keras is an AllToAll.
    assert not counts["AllToAll"] and not counts["CollectiveReduceV2"]


def test_groups_without_a_device_assignment_travel_as_a_stack():
    counts, sums = _trace([[2, 0], [1, 3]], with_device_assignment=False)
    assert sorted(shape for shape, _ in sums) == [[2], [2, 3, 2]] or (
        [shape for shape, _ in sums] == [[2, 7]]
    )
    for _, assignment in sums:
        assert assignment.tolist() == [[0, 1, 2, 3]]
    assert not counts["AllToAll"]


def test_groups_of_one_need_nothing():
    counts, sums = _trace([[0], [1], [2], [3]])
    assert sums == [] and not counts["AllToAll"]


def test_the_finite_flag_goes_over_all_replicas():
    _, sums = _trace(
        [[0, 1], [2, 3]],
        inner=lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD()
        ),
    )
    assert [assignment.tolist() for _, assignment in sums] == [
        [[0, 1], [2, 3]],
        [[0, 1], [2, 3]],
        [[0, 1, 2, 3]],
    ]
