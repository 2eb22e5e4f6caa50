"""Workers that die, hang or lose the network: started again, to the bit."""

import itertools
import json
import os
import re
import subprocess
import threading
import time
from concurrent import futures

import numpy as np
import pytest

from tests.programs import launched_job
from tests.support import cluster
from tests.support import group_training
from tests.support import namespaces
from tests.support import processes

NUM_WORKERS = launched_job.NUM_WORKERS
_LIMIT_SECONDS = 240
# What TensorFlow says of a worker that is gone: its heartbeat stopped, or its
# connection was closed, or, of the leader, that it can't be reached.
CAUSE = (
    r"(?s)(stopped sending heartbeats\):(\s+/job:worker/replica:0/task:\d)*?"
    r"\s+/job:worker/replica:0/task:{0}"
    r"|Connection reset by peer|Socket closed|failed to connect"
    r"|leader|Failed to send RPC to coordination service"
    r"|RPC: /tensorflow.CoordinationService/Heartbeat)"
)
_STANDS_STILL = (
    f"A batch waited longer than {launched_job.TIMEOUT_SECONDS} seconds for"
    r" data, or for the other workers .* A worker or its input pipeline hangs"
)
_CAUSES = {
    "stop": CAUSE.format(r"\d"),
    "hang": rf"{_STANDS_STILL}, probably Worker \d \(127\.0\.0\.1:\d+\)\.",
    "load": _STANDS_STILL,
}
_ENVIRONMENT = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}


class _Launched:
    """A finished launch: its lines, and when each came."""

    def __init__(self, command, num_processes):
        self.lines = []
        with processes.started(
            command,
            num_processes,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
            env=_ENVIRONMENT,
        ) as process:
            # A launch that hangs fails, and the test with it. It ends workers,
            # which have a process group of their own.
            limit = threading.Timer(_LIMIT_SECONDS, process.terminate)
            limit.start()
            for line in process.stdout:
                self.lines.append((time.time(), line.rstrip()))
            self.code = process.wait()
            limit.cancel()

    def text(self):
        return "\n".join(line for _, line in self.lines)

    def said(self, after=0):
        """What workers printed from a line on, without their ranks."""
        lines = (line for _, line in self.lines[after:])
        return "\n".join(re.sub(r"^\[\d\] ", "", line) for line in lines)

    def finals(self, word="final"):
        """What every worker of this launch holds at the end, by rank."""
        found = re.findall(rf"^\[\d\] {word} (.*)$", self.text(), re.M)
        return {rank: rest for rank, *rest in map(json.loads, found)}

    def faults(self):
        """For each fault its kind, its line, and its time."""
        for index, (_, line) in enumerate(self.lines):
            if match := re.fullmatch(r"\[\d\] fault (\w+) ([\d.]+)", line):
                yield match[1], index, float(match[2])


def _launch(directory, *faults):
    """Trains through faults; what is left is what undisturbed training has."""
    launched = _Launched(
        processes.python(
            *("-m", "tf_xshard", "launch", "--grace", "5"),
            *("--workers", str(NUM_WORKERS)),
            *("--max-restarts", str(len(faults))),
            *("-m", "tests.programs.launched_job", str(directory), *faults),
        ),
        NUM_WORKERS * (1 + len(faults)),
    )
    assert launched.code == 0, launched.text()[-5000:]
    assert len(list(launched.faults())) == len(faults), launched.text()[-5000:]
    _check_finals(launched.finals(), launched.finals("undisturbed"))
    return launched


def _check_finals(finals, undisturbed):
    assert sorted(finals) == list(range(NUM_WORKERS))
    assert finals == undisturbed
    # Equal weights; batch statistics differ by replica.
    [first, *_], [other, *_] = finals.values()
    assert [a == b for a, b in zip(first[:8], other[:8], strict=True)] == [
        "moving" not in v.path for v in group_training.network().weights
    ]


def _schedule(rng, kinds):
    """Faults at random steps, in this order; the first kill hits the chief."""
    edges = np.linspace(4, launched_job.NUM_STEPS, len(kinds) + 1).astype(int)
    ranks = rng.integers(NUM_WORKERS, size=len(kinds))
    ranks[kinds.index("kill")] = 0
    return [
        f"{kind}:{rank}:{rng.integers(low, high)}"
        for kind, rank, (low, high) in zip(
            kinds, ranks, itertools.pairwise(edges), strict=True
        )
    ]


def _ended(launched, at):
    """When all workers of a launch had ended, after a fault."""
    return next(
        when
        for when, line in launched.lines
        if when > at
        and re.match(r"tf_xshard launch: worker \d (was|failed)", line)
    )


def _check_times(launched, report):
    for kind, index, at in launched.faults():
        seconds = _ended(launched, at) - at
        report(f"{kind}: all workers had ended {seconds:.1f} s later")
        # Alone, they need the timeout and 5 seconds. Other tests run, too.
        assert seconds < 2 * launched_job.TIMEOUT_SECONDS + 20
        # The launcher sees nothing then: the others say what is wrong.
        if cause := _CAUSES.get(kind):
            said = launched.said(after=index)
            assert re.search(cause, said), said[:3000]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """A function: a launch whose chief is killed in the second epoch."""
    directory = tmp_path_factory.mktemp("saves") / "saves"
    return cluster.once(lambda: _launch(directory, "kill:0:12"))


def test_the_chief_is_killed(launched, report):
    """All start again, and go on where they were."""
    ended = launched()
    _check_times(ended, report)
    started = re.findall(r"^started (\d) \[(.*)\]$", ended.said(), re.M)
    assert started == [("0", "")] * 2 + [("1", "1, 4")] * 2
    assert "worker 0 was ended by SIGKILL" in ended.text()


def test_a_worker_is_preempted(launched):
    """All save the same step and end with 143; then the bits are the same."""
    ended = launched()
    preempted = ended.finals("preempted")
    [code, epoch, step] = preempted[0][0]
    # The workers ask each other after a few batches, and after an epoch.
    assert code == 143 and (0, 5) <= (epoch, step) <= (1, 0)
    undisturbed = ended.finals("undisturbed")
    for rank, (position, *held) in preempted.items():
        assert position == [code, epoch, step]
        assert held == undisturbed[rank]


@pytest.mark.full
def test_workers_that_fail(tmp_path, report):
    """Of one training, data do not come; the chief is killed; two stand still.

    A worker that hangs or waits for data still sends heartbeats.
    """
    # A loader counts batches from the start of its process: before a restart.
    faults = _schedule(
        np.random.default_rng(0), ["load", "kill", "stop", "hang"]
    )
    report(f"faults: {faults}")
    _check_times(_launch(tmp_path, *faults), report)


@pytest.mark.full
def test_a_preempted_worker_is_started_again(tmp_path, report):
    """SIGTERM to one worker: all save the same step, and go on from there."""
    launched = _launch(tmp_path, "preempt:1:7")
    saved = re.findall(
        r"All have saved (epoch \d, step \d) .* exit code 143", launched.said()
    )
    # At the end of the batch in which the signal came, or of the next one. The
    # worker that fails first says it twice.
    assert len(saved) >= NUM_WORKERS and len(set(saved)) == 1
    assert saved[0] in ("epoch 1, step 0", "epoch 1, step 1")
    [(_, _, at)] = launched.faults()
    seconds = _ended(launched, at) - at
    report(f"preempt: all workers had ended {seconds:.1f} s later")
    assert seconds < launched_job.TIMEOUT_SECONDS


@pytest.mark.full
def test_a_worker_that_is_cut_off(tmp_path, report):
    """Two hosts, each with its launcher; one loses its network for a while."""
    if not namespaces.are_allowed():
        pytest.skip("needs root")
    hosts = ",".join(
        f"{namespaces.address(r)}:4000" for r in range(NUM_WORKERS)
    )
    with (
        namespaces.made(NUM_WORKERS) as names,
        futures.ThreadPoolExecutor(NUM_WORKERS) as pool,
    ):
        launches = list(
            pool.map(
                lambda rank: _Launched(
                    [
                        *namespaces.inside(names[rank]),
                        *processes.python("-m", "tf_xshard", "launch"),
                        *("--hosts", hosts, "--rank", str(rank)),
                        *("--max-restarts", "4"),
                        *("-m", "tests.programs.launched_job"),
                        *(str(tmp_path / "saves"), "cut:1:13"),
                    ],
                    NUM_WORKERS,
                ),
                range(NUM_WORKERS),
            )
        )
    logs = [one.text() for one in launches]
    assert [one.code for one in launches] == [0] * NUM_WORKERS, logs
    [(_, _, at)] = launches[1].faults()
    finals, undisturbed, seconds = {}, {}, []
    for rank, launched in enumerate(launches):
        finals |= launched.finals()
        undisturbed |= launched.finals("undisturbed")
        seconds.append(_ended(launched, at) - at)
        assert seconds[-1] < 2 * launched_job.TIMEOUT_SECONDS + 20, seconds
        if rank == 0:
            said = launched.said()
            cause = f"{CAUSE}|waited longer than"
            assert re.search(cause.format(1), said), said[-3000:]
    _check_finals(finals, undisturbed)
    report(
        f"cut off: workers had ended {[round(s, 1) for s in seconds]} s later,"
        f" {[log.count('launch: restart ') for log in logs]} restarts"
    )
