"""Groups over hosts, and reduction on two levels."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tf_xshard import testing


def _strategy(devices, num_replicas, cluster=None):
    """What `by_host` sees of a strategy on hardware that is not here."""
    spec = types.SimpleNamespace(as_dict=lambda: cluster)
    return types.SimpleNamespace(
        num_replicas_in_sync=num_replicas,
        extended=types.SimpleNamespace(worker_devices=devices),
        cluster_resolver=types.SimpleNamespace(cluster_spec=lambda: spec),
    )


def _devices(kind, *tasks_and_indices):
    return [
        f"/job:worker/replica:0/task:{task}/device:{kind}:{index}"
        for task, index in tasks_and_indices
    ]


@pytest.mark.parametrize(
    "devices, cluster, expected",
    [
        (
            _devices("GPU", (0, 0), (0, 1)),
            {"worker": ["a:1", "b:1"]},
            [[0, 1], [2, 3]],
        ),
        (  # Two processes on each of two hosts, in turns.
            _devices("CPU", (0, 0)),
            {"worker": ["a:1", "b:1", "a:2", "b:2"]},
            [[0, 2], [1, 3]],
        ),
        (
            _devices("CPU", (0, 0)),
            {"chief": ["[::1]:1"], "worker": ["[::2]:1"], "ps": ["p:1"]},
            [[0], [1]],
        ),
        (  # A TPU pod with cores in an order of its own.
            _devices("TPU", (1, 0), (0, 0), (1, 1), (0, 1)),
            None,
            [[0, 2], [1, 3]],
        ),
    ],
    ids=["gpus", "processes", "chief", "tpu"],
)
def test_by_host(devices, cluster, expected):
    strategy = _strategy(devices, sum(map(len, expected)), cluster)
    groups = tf_xshard.GroupAssignment.by_host(strategy)
    assert groups.to_list() == expected
    columns = [list(row) for row in zip(*expected, strict=True)]
    assert groups.transposed().to_list() == columns
    assert groups.transposed().transposed() == groups


def test_by_host_of_real_strategies():
    by_host = tf_xshard.GroupAssignment.by_host
    assert by_host(replicas.mirrored(4)).to_list() == [[0, 1, 2, 3]]
    pod = testing.simulated_tpu_strategy(8, num_hosts=2)
    assert by_host(pod).to_list() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_hosts_of_different_sizes_are_refused():
    cluster = {"worker": ["a:1", "a:2", "b:1"]}
    strategy = _strategy(_devices("CPU", (0, 0)), 3, cluster)
    with pytest.raises(ValueError, match="different numbers of replicas"):
        tf_xshard.GroupAssignment.by_host(strategy)


@replicas.on_mirrored_and_tpu
def test_two_levels(kind):
    """Within hosts at each step, across hosts every second: NumPy's numbers."""
    strategy = replicas.STRATEGIES[kind](4)
    hosts = tf_xshard.GroupAssignment([[0, 1], [2, 3]])
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])
        optimizer = tf_xshard.CrossShardOptimizer(
            tf_xshard.AGNOptimizer(
                keras.optimizers.SGD(1.0),
                local_optimizer=keras.optimizers.SGD(0.5),
                communication_period=2,
                accumulate="updates",
                normalize=False,
                group_assignment=hosts.transposed(),
            ),
            group_assignment=hosts,
            loss_normalization="replica",
        )
        optimizer.build([weight])

    def on_replica(gradients):
        own = tf.gather(gradients, replicas.replica_id_tensor())
        optimizer.apply([own], [weight])

    step = tf.function(
        lambda gradients: strategy.run(on_replica, (gradients,)),
        autograph=False,
    )
    rng = np.random.default_rng(0)
    expected = np.tile([1.0, 2.0], [4, 1])
    for number in range(4):
        gradients = rng.normal(size=(4, 2)).astype("float32")
        step(tf.constant(gradients))
        for host in hosts:
            expected[list(host)] -= 0.5 * gradients[list(host)].mean(0)
        if number % 2:
            expected[:] = (expected[[0]] + expected[[2]]) / 2
        got = np.array(replicas.values(strategy, weight))
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        assert (got[0] == got[1]).all() and (got[2] == got[3]).all()
        assert np.array_equal(got[0], got[2]) == bool(number % 2)
