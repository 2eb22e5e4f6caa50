"""TensorFlow's collectives: ranks, keys, and what TensorFlow is told."""

import types

import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import steps
from tf_xshard import collectives
from tf_xshard.collectives import subgroups
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import site as site_lib

ONE = [tf.config.LogicalDeviceConfiguration(1024)]
GPU = "/job:localhost/replica:0/task:0/device:GPU:1"
CPU = "/job:localhost/replica:0/task:0/device:CPU:1"


@pytest.mark.parametrize(
    "kind, device, gpus, hint",
    [
        ("mirrored", GPU, [None, None], "nccl"),
        ("mirrored", GPU, [ONE, ONE], "nccl"),
        ("mirrored", GPU, [2 * ONE], "auto"),
        ("mirrored", GPU, [None, 2 * ONE], "auto"),
        ("mirrored", CPU, [None, None], "auto"),
        # Its CommunicationOptions decide, which "auto" leaves to TensorFlow.
        ("multi_worker", GPU, [None, None], "auto"),
    ],
)
def test_nccl_is_for_whole_gpus(kind, device, gpus, hint, monkeypatch):
    monkeypatch.setattr(
        tf.config, "get_visible_devices", lambda kind: range(len(gpus))
    )
    monkeypatch.setattr(
        tf.config, "get_logical_device_configuration", lambda index: gpus[index]
    )
    site = types.SimpleNamespace(kind=kind, device=device)
    assert subgroups._hint(site) == hint


CROSSED = [[3, 1], [0, 2]]


@pytest.mark.parametrize(
    "devices, groups, graph",
    [
        (replicas.MIXED, CROSSED, True),
        (replicas.MIXED, CROSSED, False),
        (replicas.TWELVE, [[*range(12)]], True),
    ],
    ids=["graph", "eager", "twelve"],
)
def test_ranks_are_positions(devices, groups, graph):
    """Each row names its source and its destination, by replica."""
    strategy = replicas.mirrored_on(devices)
    assignment = tf_xshard.GroupAssignment(groups)
    group_size = assignment.group_size

    def on_replica():
        site = site_lib.current()
        path = collectives.transport_for(
            site, transport_lib.Channel(assignment, tf_xshard.Communication())
        )
        own = float(site.replica_id)
        to_each = 100 * tf.range(float(group_size))[:, tf.newaxis] + own
        return (
            path.position(),
            path.gather([tf.fill([1 + site.replica_id % 3], own)])[0],
            path.all_gather([tf.fill([2], own)])[0],
            path.all_to_all([to_each])[0],
            path.reduce_scatter([to_each])[0],
        )

    position, gathered, stacked, exchanged, summed = (
        [*map(np.asarray, values)]
        for values in steps.run(strategy, on_replica, graph)
    )
    for group in groups:
        # TensorFlow sorts devices by their numbers.
        members = sorted(group, key=devices.__getitem__)
        for index, r in enumerate(members):
            assert position[r] == index
            assert gathered[r].tolist() == [
                m for m in members for _ in range(1 + m % 3)
            ]
            assert stacked[r].tolist() == [[m, m] for m in members]
            assert exchanged[r].tolist() == [[100 * index + m] for m in members]
            assert summed[r].tolist() == [
                100 * index * group_size + sum(members)
            ]


def test_tasks_are_ranked_as_strings():
    """TensorFlow ranks task 10 of a cluster before task 2."""
    cluster = tf.train.ClusterSpec(
        {"chief": ["c:1"], "worker": [f"w{i}:1" for i in range(12)]}
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy.__new__(
        tf.distribute.MultiWorkerMirroredStrategy
    )
    strategy._extended = types.SimpleNamespace(
        worker_devices=[
            f"/job:worker/replica:0/task:3/device:GPU:{i}" for i in range(2)
        ],
        _num_replicas_in_sync=26,
        _cluster_resolver=types.SimpleNamespace(cluster_spec=lambda: cluster),
    )
    names = site_lib.device_names(strategy)
    assert names[:3] == (
        "/job:chief/replica:0/task:0/device:GPU:0",
        "/job:chief/replica:0/task:0/device:GPU:1",
        "/job:worker/replica:0/task:0/device:GPU:0",
    )
    assert names[-1] == "/job:worker/replica:0/task:11/device:GPU:1"
    [members] = site_lib.ranked(
        tf_xshard.GroupAssignment([range(25, -1, -1)]), strategy
    )
    tasks = [0, 1, 10, 11, *range(2, 10)]
    processes = [0, *(1 + task for task in tasks)]
    assert list(members) == [2 * p + i for p in processes for i in range(2)]


@pytest.mark.parametrize("group_size", [12, 13, 16, 17, 40])
def test_every_pair_exchanges_rows_under_keys_of_its_own(group_size):
    exchanges = {
        position: subgroups._exchanges(group_size, position)
        for position in range(group_size)
    }
    # The replicas of an exchange all take part in it, in one order. Eleven is
    # the largest number in which all pairs of digits differ.
    in_order = list(
        dict.fromkeys(tuple(one) for e in exchanges.values() for one in e)
    )
    assert max(map(len, in_order)) <= 11
    for position, own in exchanges.items():
        assert own == [list(one) for one in in_order if position in one]
        assert {i for one in own for i in one} == set(range(group_size))
        assert sum(map(len, own)) < 2 * group_size
