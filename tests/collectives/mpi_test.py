"""Sums over MPI: against NumPy, on four processes; and what goes wrong."""

import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.programs import mpi_program as program
from tests.programs import multi_worker_program as cases
from tests.support import mpiexec
from tests.support import random_stacks
from tests.support import replicas
from tests.support import stacks
from tf_xshard.collectives import mpi
from tf_xshard.distribute import engines

NUM_WORKERS = cases.NUM_WORKERS
_PROGRAM = "tests.programs.mpi_program"


@pytest.fixture(scope="module")
def results():
    """What the processes hold, by rank."""
    ended = mpiexec.run(NUM_WORKERS, _PROGRAM)
    assert ended.returncode == 0, ended.stderr[-5000:]
    found = sorted(mpiexec.printed(ended), key=lambda one: one["rank"])
    assert len(found) == NUM_WORKERS
    return found


def _members(rank):
    [members] = [group for group in program.GROUPS if rank in group]
    return members


def _of(members, shape, dtype):
    return [
        np.float64(program.own_numbers(rank, shape, dtype)) for rank in members
    ]


def _expected(rank):
    """What each operation gives to a process, by NumPy."""
    members = _members(rank)
    position = members.index(rank)
    found = {"path": "MPI"}
    for dtype in program.SUMMED:
        found[f"sum {dtype}"] = [
            sum(_of(members, shape, dtype)) for shape in ([3, 5], [], [0])
        ]
        large = sum(_of(members, program.LARGE, dtype))
        found[f"checksum {dtype}"] = [program.checksum(large)]
        rows = _of(members, [2, 3], dtype)
        found[f"reduce_scatter {dtype}"] = [sum(rows)[position]]
    for dtype in program.MOVED:
        rows = _of(members, [2, 3], dtype)
        found[f"all_to_all {dtype}"] = [np.stack(rows)[:, position]]
        found[f"all_gather {dtype}"] = [np.stack(rows)[:, 0]]
        some = [_of([r], [program.ROWS[r], 2], dtype)[0] for r in members]
        found[f"gather {dtype}"] = [np.concatenate(some)]
    return found


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_operations(results, mode):
    for rank, result in enumerate(results):
        expected = _expected(rank)
        assert result[mode].keys() == expected.keys()
        for name, values in expected.items():
            got = result[mode][name]
            if name == "path":
                assert got == values
                continue
            for one, value in zip(got, values, strict=True):
                np.testing.assert_array_equal(one, value, err_msg=name)


def _check_oracle(name, rank, got):
    members = _members(rank) if cases.GROUPS[name] == cases.CROSSED else None
    if members is None:
        [members] = [
            group
            for group in cases.GROUPS[name] or [[0, 1, 2, 3]]
            if rank in group
        ]
    dense, partly_none, table = got[name]
    rows = sum((r + 1) * 10**r for r in members)
    return (
        dense == [-sum(10**r for r in members)] * 3
        and partly_none == -sum(10**r for r in members if r != 2)
        and table == [[0, 0], [-rows, -rows], [0, 0], [0, 0]]
    )


@pytest.mark.parametrize("name", cases.GROUPS)
def test_oracle(results, name):
    """Dense, sparse, and None on one worker; wrong reductions differ."""
    for rank, result in enumerate(results):
        assert _check_oracle(name, rank, result["oracle"])
        for mutant, got in result["wrong"].items():
            ignores = mutant == "groups_ignored" and cases.GROUPS[name] is None
            assert _check_oracle(name, rank, got) == ignores, mutant


def test_a_worker_that_traces_again_by_itself(results):
    for rank, result in enumerate(results):
        assert result["retrace"] == [-33 if rank < 2 else -3300]


def test_group_reduce(results):
    """The gradient is the sum of the group's upstream gradients."""
    for rank, result in enumerate(results):
        want = [[1010, 6], [101, 4]][rank % 2 == 0]
        assert result["group_reduce"] == [want] * 3


def test_nested_optimizers(results):
    assert len(results[0]["nesting"]) > 5
    for seed in range(len(results[0]["nesting"])):
        stack, gradients = random_stacks.random_case(seed, NUM_WORKERS)
        stacks.check(
            np.stack([result["nesting"][seed] for result in results]),
            stack,
            gradients,
            f"seed {seed}",
        )


# What goes wrong.


def test_a_process_that_is_missing():
    """An error that names it, soon after the timeout."""
    ended = mpiexec.run(NUM_WORKERS, _PROGRAM, "absent")
    errors = [one["absent"] for one in mpiexec.printed(ended) if one["absent"]]
    assert len(errors) == 3, ended.stderr[-5000:]
    for text, seconds in errors:
        assert (
            "MPI's all-reduce of shape () waited longer than 2 seconds"
            " (Communication.timeout_seconds) for ranks [3] of [0, 1, 2, 3]."
        ) in text
        assert re.search(r"steps: Worker 3 \(127\.0\.0\.1:\d+\)\.", text)
        assert 2 <= seconds < 20


def test_a_process_that_fails_ends_the_job():
    """Its error comes at once, and the others do not wait 300 seconds."""
    start = time.monotonic()
    ended = mpiexec.run(2, _PROGRAM, "raises")
    assert time.monotonic() - start < 60
    assert ended.returncode != 0
    assert "ValueError: the cause" in ended.stderr
    assert not mpiexec.printed(ended)


def test_a_process_that_ends_too_early():
    """The others say so, long before their timeout."""
    ended = mpiexec.run(2, _PROGRAM, "leaves")
    [text, seconds] = mpiexec.printed(ended)[0]["leaves"]
    assert "can't be completed: ranks [1] of [0, 1] have ended." in text
    assert seconds < 60


def test_a_session_does_not_use_mpi():
    chosen = tf_xshard.Communication(transport="mpi")
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match="a TF1 session runs this graph"):
            mpi.is_chosen(None, chosen)
        assert not mpi.is_chosen(None, tf_xshard.Communication())


def test_mpi_tells_where_rank_0_is():
    """Where the launcher does not say that all are on one host."""
    ended = mpiexec.run(2, _PROGRAM, "hosts")
    found = mpiexec.printed(ended)
    assert sorted(one["task"]["index"] for one in found) == [0, 1], (
        ended.stderr[-3000:]
    )
    assert found[0]["cluster"] == found[1]["cluster"]


@pytest.mark.parametrize("kind", ["mirrored", "tpu"])
def test_only_processes_use_mpi(kind):
    strategy = replicas.STRATEGIES[kind](2)
    with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(),
            communication=tf_xshard.Communication(transport="mpi"),
        )
    with pytest.raises(ValueError, match="is for MultiWorkerMirroredStrategy"):
        replicas.apply_once(
            strategy, optimizer, lambda r: [tf.constant(1.0)], [weight]
        )


@pytest.mark.parametrize("connects", [True, False])
def test_a_child_process_is_not_mpi_s(connects, monkeypatch):
    """A child has its parent's variables, but no place in MPI."""
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("TF_XSHARD_CONNECTED", "1")
    if connects:
        for name, value in engines.connected().items():
            monkeypatch.setenv(name, value)
    assert engines.is_started_by_mpi() == connects
    monkeypatch.delenv("PMI_RANK")
    assert not engines.is_started_by_mpi()
