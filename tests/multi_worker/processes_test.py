"""rank, is_chief and barrier in one process; four_processes_test has more."""

import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tf_xshard.multi_worker import local_cluster

FUNCTIONS = [tf_xshard.rank, tf_xshard.is_chief, tf_xshard.barrier]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_a_strategy_each_of_several_workers_would_be_the_chief(
    function, monkeypatch
):
    addresses = local_cluster.local_addresses(2)
    monkeypatch.setenv("TF_CONFIG", local_cluster.tf_config(addresses, 1))
    with pytest.raises(ValueError, match=rf"{function.__name__}\(strategy\)"):
        function()


def test_one_process_is_the_chief():
    for strategy in (None, replicas.mirrored(2)):
        assert tf_xshard.rank(strategy) == 0
        assert tf_xshard.is_chief(strategy)
        tf_xshard.barrier(strategy)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_strategies_that_are_not_supported_are_refused(function):
    with pytest.raises(ValueError, match="does not support"):
        function(tf.distribute.experimental.CentralStorageStrategy())


def test_a_barrier_in_replica_context_is_refused():
    with pytest.raises(RuntimeError, match="in replica context"):
        replicas.mirrored(2).run(tf_xshard.barrier)


@pytest.mark.parametrize("timeout", [0, "soon"])
def test_a_barrier_checks_its_timeout(timeout):
    with pytest.raises((TypeError, ValueError), match="timeout_seconds"):
        tf_xshard.barrier(timeout_seconds=timeout)
