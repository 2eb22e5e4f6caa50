"""Four real processes under MultiWorkerMirroredStrategy."""

import json
import os
import re
import subprocess
import tempfile
import time

import keras
import numpy as np
import pytest

from tests import agn_oracle
from tests import multi_worker_program as program
from tests import training
from tf_xshard import local_cluster

NUM_WORKERS = program.NUM_WORKERS
# What TensorFlow says of a worker that is gone: its heartbeat stopped, or its
# connection was closed, or, of the leader, that it can't be reached.
_CAUSE = (
    r"(?s)(stopped sending heartbeats\):\s+/job:worker/replica:0/task:{0}"
    r"|Connection reset by peer|Socket closed|failed to connect"
    r"|leader|Failed to send RPC to coordination service)"
)
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class _Workers:
    """Processes of one cluster, with their output in files."""

    def __init__(self, case):
        self._output = [
            (tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+"))
            for _ in range(NUM_WORKERS)
        ]
        self.processes = local_cluster.start(
            ["-m", "tests.multi_worker_program", case],
            self._output,
            {"TF_CPP_MIN_LOG_LEVEL": "2"},
            cwd=_ROOT,
        )

    def wait(self, timeout_seconds):
        """Exit codes; kills what still runs when the time is over."""
        deadline = time.monotonic() + timeout_seconds
        try:
            for process in self.processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            codes = [process.poll() for process in self.processes]
            for process in self.processes:
                process.kill()
                process.wait()
        return codes

    def read(self, rank, stream):
        file = self._output[rank][stream]
        file.seek(0)
        return file.read()

    def results(self):
        return [
            json.loads(self.read(rank, 0).strip().splitlines()[-1])
            for rank in range(NUM_WORKERS)
        ]

    def close(self):
        for pair in self._output:
            for file in pair:
                file.close()


@pytest.fixture(scope="module")
def results():
    """What the four workers hold after all cases, one launch for all."""
    workers = _Workers("cases")
    codes = workers.wait(300)
    for rank, code in enumerate(codes):
        assert code == 0, (codes, rank, workers.read(rank, 1)[-3000:])
    found = workers.results()
    workers.close()
    return found


@pytest.mark.parametrize("mode", ["function", "eager"])
@pytest.mark.parametrize("groups", program.GROUPS)
def test_oracle(results, groups, mode):
    assignment = program.GROUPS[groups] or [[0, 1, 2, 3]]
    for rank, result in enumerate(results):
        [members] = [group for group in assignment if rank in group]
        dense, partly_none, table = result["oracle"][f"{groups}/{mode}"]
        total = sum(10**r for r in members)
        assert dense == [-total] * 3
        assert partly_none == -sum(10**r for r in members if r != 2)
        rows = sum((r + 1) * 10**r for r in members)
        assert table == [[0, 0], [-rows, -rows], [0, 0], [0, 0]]


@pytest.mark.parametrize("groups", program.GROUPS)
def test_compat_v1(results, groups):
    assignment = program.GROUPS[groups] or [[0, 1, 2, 3]]
    for rank, result in enumerate(results):
        [members] = [group for group in assignment if rank in group]
        weight, other, step = result["compat_v1"][groups]
        mean = sum(10**r for r in members) / len(members)
        partly = sum(10**r for r in members if r != 2) / len(members)
        # g, and then 0.5 g + g.
        np.testing.assert_allclose(
            [weight, other], [-2.5 * mean, -2.5 * partly]
        )
        assert step == 2


def test_an_overflow_on_one_worker(results):
    for result in results:
        assert result["loss_scale"] == [0.0, 4.0]


def test_a_worker_that_traces_again_by_itself(results):
    for rank, result in enumerate(results):
        assert result["retrace"] == [-33 if rank < 2 else -3300]


@pytest.mark.parametrize("groups", program.GROUPS)
def test_towers(results, groups):
    assignment = program.GROUPS[groups] or [[0, 1, 2, 3]]
    for rank, result in enumerate(results):
        [members] = [group for group in assignment if rank in group]
        total = sum(10**r for r in members)
        partly = sum(10**r for r in members if r != 2)
        calls = 1 + 10**4 + 10**8
        table = np.array([1, 1 + 2 * 10**4 + 10**8, 10**8, 0]) * total
        for call, (dense, some, rows) in enumerate(result["towers"][groups]):
            rounds = (call + 1) // 3
            np.testing.assert_allclose(dense, [-rounds * calls * total] * 2)
            np.testing.assert_allclose(some, -rounds * calls * partly)
            np.testing.assert_allclose(
                rows, -rounds * np.stack([table, table], 1)
            )


@pytest.mark.parametrize("name", agn_oracle.OPTIMIZERS)
@pytest.mark.parametrize("groups", program.GROUPS)
def test_agn(results, groups, name):
    oracle = agn_oracle.OPTIMIZERS[name][0]
    assignment = program.GROUPS[groups] or [[0, 1, 2, 3]]
    expected = agn_oracle.history(oracle, oracle, 4, assignment, 3, 9)
    for rank, result in enumerate(results):
        for got, (local, center) in zip(
            result["agn"][f"{groups}/{name}"], expected, strict=True
        ):
            np.testing.assert_allclose(
                got, [local[rank], center[rank]], rtol=2e-5, atol=2e-5
            )


@pytest.mark.parametrize("name", ["towers", "agn"])
def test_bytes_on_the_wire(results, name, report):
    """Nothing but heartbeats until the last of four calls."""
    sent = np.array(results[0]["wire"][name])
    # Each worker sends every number but its own part, twice; all together:
    least = 2 * (NUM_WORKERS - 1) * 4 * program.NUM_FLOATS
    # The least of all rounds: others may use the interface, too.
    silent = sent[:, 1:3].min(axis=0)
    report(
        f"{name}: {least / 1e6:.1f} MB is a ring's bound, sent"
        f" {np.median(sent[:, 3]) / 1e6:.1f} MB, and before that"
        f" {silent.max() / 1e6:.3f} MB"
    )
    assert np.median(sent[:, 3]) > 0.98 * least
    assert sent[:, 3].min() < 1.2 * least
    assert silent.max() < 0.01 * least


def test_training_equals_one_device_on_the_groups_shards(results):
    x, y = training.data()
    for members in program.GROUPS["crossed"]:
        rows = training.shard_rows(len(x), 64, NUM_WORKERS, members)
        reference = training.train(
            lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
            xy=(x[rows], y[rows]),
            batch_size=32,
        )[1]
        for rank in members:
            got = [[np.array(v)] for v in results[rank]["training"]]
            assert training.deviation(got, reference) <= 1e-6
        first, second = members
        assert results[first]["training"] == results[second]["training"]


def _check_killed(case, killed_rank, report):
    workers = _Workers(case)
    codes = {}
    died_at = None
    deadline = time.monotonic() + 150
    while len(codes) < NUM_WORKERS and time.monotonic() < deadline:
        for rank, process in enumerate(workers.processes):
            if rank not in codes and process.poll() is not None:
                codes[rank] = process.returncode
                if rank == killed_rank:
                    died_at = time.monotonic()
                else:
                    last_end = time.monotonic()
        time.sleep(0.05)
    workers.wait(0.1)
    assert len(codes) == NUM_WORKERS, f"still running after 150 s: {codes}"
    assert codes[killed_rank] == -9
    seconds = last_end - died_at
    report(f"the others ended {seconds:.1f} s after worker {killed_rank}")
    assert seconds < program.TIMEOUT_SECONDS + 10
    for rank in codes:
        if rank != killed_rank:
            assert codes[rank] != 0
            error = workers.read(rank, 1)
            assert re.search(_CAUSE.format(killed_rank), error), error[-3000:]
    workers.close()


def test_a_worker_is_killed(report):
    _check_killed("killed", 3, report)


@pytest.mark.full
def test_the_chief_is_killed(report):
    _check_killed("killed_chief", 0, report)


def test_a_worker_that_does_not_take_part_is_named():
    workers = _Workers("absent")
    codes = workers.wait(120)
    assert codes == [0] * NUM_WORKERS, workers.read(0, 1)[-3000:]
    for message in workers.results()[:3]:
        assert "Worker 3 did not say within 3 seconds" in message
        assert "the_weight" in message
    workers.close()
