"""Workers that die, hang or lose the network: started again, to the bit."""

import json
import os
import re
import subprocess
import threading
import time
from concurrent import futures

import pytest

from tests.programs import launched_job
from tests.support import cluster
from tests.support import group_training
from tests.support import namespaces
from tests.support import processes

NUM_WORKERS = launched_job.NUM_WORKERS
_SECONDS_PER_START = 120
# What TensorFlow says of a worker that is gone: its heartbeat stopped, or its
# connection was closed, or, of the leader, that it can't be reached.
_CAUSE = (
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
    "stop": _CAUSE.format(r"\d"),
    "hang": rf"{_STANDS_STILL}, probably Worker \d \(127\.0\.0\.1:\d+\)\.",
    "load": _STANDS_STILL,
    "cut": f"{_CAUSE.format(1)}|waited longer than",
}


class _Launched:
    """A finished launch: its lines, and when each came."""

    def __init__(self, options, arguments, before=()):
        self.lines = []
        with processes.started(
            [
                *before,
                *processes.python("-m", "tf_xshard", "launch", *options),
                *("-m", "tests.programs.launched_job", *arguments),
            ],
            NUM_WORKERS * len(arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        ) as process:
            # A launch that hangs fails, and the test with it. It ends workers,
            # which have a process group of their own.
            limit = threading.Timer(
                _SECONDS_PER_START * len(arguments), process.terminate
            )
            limit.start()
            for line in process.stdout:
                self.lines.append((time.time(), line.rstrip()))
            self.code = process.wait()
            limit.cancel()

    def said(self, after=0.0):
        """Returns what was printed after a time, without the ranks."""
        lines = (line for when, line in self.lines if when > after)
        return "\n".join(re.sub(r"^\[\d\] ", "", line) for line in lines)

    def finals(self, word="final"):
        """What every worker of this launch holds at the end, by rank."""
        found = re.findall(rf"^{word} (.*)$", self.said(), re.M)
        return {rank: rest for rank, *rest in map(json.loads, found)}

    def faults(self):
        """The kind of each fault, and its time."""
        found = re.findall(r"^fault (\w+) ([\d.]+)$", self.said(), re.M)
        return [(kind, float(at)) for kind, at in found]

    def seconds_until_end(self, at):
        """From a fault until all of its workers had ended."""
        ended = r"tf_xshard launch: worker \d (was|failed)"
        return next(
            when - at
            for when, line in self.lines
            if when > at and re.match(ended, line)
        )


def _launch(directory, *faults):
    options = f"--grace 5 --workers {NUM_WORKERS} --max-restarts {len(faults)}"
    return _Launched(options.split(), [str(directory), *faults])


def _check(launches, report, *kinds):
    """All end soon after each fault; at last, they have undisturbed bits."""
    for one in launches:
        assert one.code == 0, one.said()[-5000:]
    faults = [fault for one in launches for fault in one.faults()]
    assert [kind for kind, _ in faults] == [*kinds]
    finals, undisturbed = (
        {r: rest for one in launches for r, rest in one.finals(word).items()}
        for word in ("final", "undisturbed")
    )
    assert sorted(finals) == list(range(NUM_WORKERS))
    assert finals == undisturbed
    # Equal weights; batch statistics differ by replica.
    [first, *_], [other, *_] = finals.values()
    assert [a == b for a, b in zip(first[:8], other[:8], strict=True)] == [
        "moving" not in v.path for v in group_training.network().weights
    ]
    for kind, at in faults:
        seconds = max(one.seconds_until_end(at) for one in launches)
        report(f"{kind}: all workers had ended {seconds:.1f} s later")
        # Alone, they need the timeout and 5 seconds. Other tests run, too.
        assert seconds < 2 * launched_job.TIMEOUT_SECONDS + 20
        # The launcher sees nothing then: the others say what is wrong.
        said = launches[0].said(after=at)
        assert re.search(_CAUSES.get(kind, ""), said), said[:3000]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """A function: a launch whose chief is killed in the second epoch."""
    directory = tmp_path_factory.mktemp("saves") / "saves"
    return cluster.once(lambda: _launch(directory, "kill:0:12"))


def test_the_chief_is_killed(launched, report):
    """All start again, and go on where they were."""
    ended = launched()
    _check([ended], report, "kill")
    started = re.findall(r"^started (\d) \[(.*)\]$", ended.said(), re.M)
    assert started == [("0", "")] * 2 + [("1", "1, 4")] * 2
    assert "worker 0 was ended by SIGKILL" in ended.said()


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
    """Of one training, data do not come, and two workers stand still.

    A worker that hangs or waits for data still sends heartbeats.
    """
    # A loader counts the batches of an epoch.
    launched = _launch(tmp_path, "load:1:6", "stop:0:11", "hang:1:19")
    _check([launched], report, "load", "stop", "hang")


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

        def launch(rank):
            return _Launched(
                ["--hosts", hosts, "--rank", str(rank), "--max-restarts", "4"],
                [str(tmp_path / "saves"), "cut:1:13"],
                namespaces.inside(names[rank]),
            )

        launches = list(pool.map(launch, range(NUM_WORKERS)))
    _check(launches, report, "cut")
