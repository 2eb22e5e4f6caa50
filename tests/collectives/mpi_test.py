"""Sums over MPI: against NumPy, on real processes; and what goes wrong."""

import sys
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.programs import mpi_program as program
from tests.support import mpiexec
from tests.support import steps
from tf_xshard.collectives import mpi
from tf_xshard.distribute import engines

_PROGRAM = "tests.programs.mpi_program"


def test_operations():
    """Groups of two processes and of one, against NumPy."""
    ended = mpiexec.run(program.NUM_WORKERS, _PROGRAM)
    assert ended.returncode == 0, ended.stderr[-5000:]
    number = 1 + 2 * len(program.SUMMED) + 3 * len(program.MOVED)
    found = mpiexec.printed(ended)
    assert len(found) == program.NUM_WORKERS
    for result in found:
        for mode in ("graph", "eager"):
            assert result[mode] == ["MPI", number, []]


# Failures, the first ones of requests that MPI never completes.


@pytest.fixture
def group(monkeypatch):
    """A group of this process, rank 1, and of rank 3, which is absent."""
    deadline = time.monotonic() + 20
    requests = types.SimpleNamespace(
        Testall=lambda requests: time.monotonic() > deadline
    )
    fake = types.SimpleNamespace(Request=requests)
    monkeypatch.setattr(mpi, "_mpi", lambda: fake)
    for name in ("_failures", "_open_requests"):
        monkeypatch.setattr(mpi, name, [])
    monkeypatch.setattr(mpi, "_ended", lambda ranks: [])
    monkeypatch.setattr(mpi.atexit, "register", lambda *_: None)
    result = mpi._Group((1, 3), 1, None)
    waits = set()
    for name, function in {
        "say_waits": lambda key, rank: waits.add(rank),
        "silent": lambda key, ranks: [*({*ranks} - waits)],
        "named": str,
    }.items():
        monkeypatch.setattr(mpi.silent_workers, name, function)
    return result


def test_a_rank_that_is_missing_is_an_error_after_the_timeout(
    group, monkeypatch
):
    """Then nothing more is sent, since MPI may still write to the arrays."""
    start = time.monotonic()
    text = (
        r"MPI's sum waited longer than 1 seconds"
        r" \(Communication.timeout_seconds\) for ranks \[3\] of \[1, 3\]\."
    )
    with pytest.raises(TimeoutError, match=text):
        group.wait(["request"], "sum", 1.0)
    assert 1 <= time.monotonic() - start < 10
    assert mpi._open_requests == ["request"]
    monkeypatch.setattr(mpi, "_group", lambda *_: group)
    with pytest.raises(TimeoutError, match=text):
        mpi._run(None, "sum", (1, 3), 1, 1.0, np.ones(3))


def test_a_rank_that_has_ended_is_an_error_at_once(group, monkeypatch):
    monkeypatch.setattr(mpi, "_ended", lambda ranks: [3])
    text = r"can't be completed: ranks \[3\] of \[1, 3\] have ended\."
    with pytest.raises(TimeoutError, match=text):
        group.wait(["request"], "sum", 300.0)


def test_an_error_ends_the_job(monkeypatch):
    """After it was printed; the others would wait for this process."""
    happened = []
    world = types.SimpleNamespace(Abort=lambda code: happened.append(code))
    fake = types.SimpleNamespace(COMM_WORLD=world)
    start = mpi._mpi.__wrapped__
    monkeypatch.setattr(mpi, "_mpi", lambda: fake)
    monkeypatch.setattr(mpi.importlib, "import_module", lambda name: fake)
    monkeypatch.setattr(sys, "excepthook", lambda *a: happened.append(a[0]))
    assert start() is fake
    sys.excepthook(ValueError, ValueError("the cause"), None)
    assert happened == [ValueError, 1]


@pytest.mark.full
def test_a_process_that_ends_too_early():
    """The others say so, long before their timeout."""
    ended = mpiexec.run(2, _PROGRAM, "leaves")
    [found] = mpiexec.printed(ended)
    [text, seconds] = found["leaves"]
    assert "can't be completed: ranks [1] of [0, 1] have ended." in text
    assert seconds < 60


def test_mpi_tells_where_rank_0_is():
    """Where the launcher does not say that all are on one host.

    The job is that of `mpiexec`, not of the shell that starts Python.
    """
    # Without TensorFlow, as `launch`, and as if each were on its own host.
    code = (
        "import os, sys; sys.argv[0] = 'tf-xshard';"
        " os.environ['MPI_LOCALNRANKS'] = '1';"
        " from tf_xshard.multi_worker import connect; connect.connect(60);"
        " print(os.environ['TF_CONFIG'], flush=True)"
    )
    script = ["bash", "-c", '"$0" -c "$1"; true', sys.executable, code]
    command = [*mpiexec.command(2, "x")[:3], *script]
    ended = mpiexec.run_command(command, tensorflow=0)
    found = mpiexec.printed(ended)
    assert sorted(one["task"]["index"] for one in found) == [0, 1], (
        ended.stderr[-3000:]
    )
    assert found[0]["cluster"] == found[1]["cluster"]


@pytest.mark.parametrize(
    "choice, started, reason, expected",
    [
        ("auto", True, None, True),
        ("auto", True, "another MPI", False),
        ("auto", False, None, False),
        ("mpi", False, None, True),
        ("tensorflow", True, None, False),
    ],
)
def test_when_mpi_is_used(choice, started, reason, expected, monkeypatch):
    site = types.SimpleNamespace(kind="multi_worker")
    monkeypatch.setattr(mpi.engines, "is_started_by_mpi", lambda: started)
    monkeypatch.setattr(mpi, "_reason_against", lambda *_: reason)
    communication = tf_xshard.Communication(transport=choice)
    assert mpi.is_chosen(site, communication) == expected


def test_a_session_does_not_use_mpi():
    chosen = tf_xshard.Communication(transport="mpi")
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match="a TF1 session runs this graph"):
            mpi.is_chosen(None, chosen)
        assert not mpi.is_chosen(None, tf_xshard.Communication())


@pytest.mark.parametrize("kind", ["mirrored", "tpu"])
def test_only_processes_use_mpi(kind):
    communication = tf_xshard.Communication(transport="mpi")
    make = lambda: tf_xshard.CrossShardOptimizer(
        keras.optimizers.SGD(), communication=communication
    )
    with pytest.raises(ValueError, match="is for MultiWorkerMirroredStrategy"):
        steps.stepped(make, lambda r: [tf.constant(1.0)], kind=kind)


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
