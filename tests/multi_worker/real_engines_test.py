"""MPI and Slurm start the processes: one device's numbers, on each.

`engines_test` has each engine's variables without starting it.
"""

import json
import os
import re
import time
from concurrent import futures

import pytest

from tests.programs import multi_worker_program
from tests.support import mpiexec
from tests.support import namespaces
from tests.support import processes
from tests.support import slurm

pytestmark = pytest.mark.full
_PROGRAM = "tests.programs.engine_program"
_SUBGROUPS = "subgroup collectives (CollectiveReduceV2)"


def _check(text, groups, path, report):
    """What every process has printed at the end of its training."""
    # Two processes may print on one line.
    decoder = json.JSONDecoder()
    finals = sorted(
        decoder.raw_decode(text, found.end())[0]
        for found in re.finditer("final ", text)
    )
    ranks, fits, paths = zip(*finals, strict=True)
    assert [*ranks] == sorted(sum(groups, []))
    assert [*paths] == [[path]] * len(finals)
    multi_worker_program.check_fit_of_groups(fits, groups)
    report(f"{len(finals)} processes, {path}: one device's weights")


def test_mpiexec(report):
    groups = [[0, 2], [1, 3]]
    ended = mpiexec.run(4, _PROGRAM, json.dumps(groups))
    assert ended.returncode == 0, ended.stderr[-5000:]
    _check(ended.stdout, groups, "MPI", report)


def test_connect_on_two_hosts(report):
    """Each is reached at the address from which it came."""
    if not namespaces.are_allowed():
        pytest.skip("needs root")
    leader = {"MASTER_ADDR": namespaces.address(0), "MASTER_PORT": "4000"}

    def run(rank, host):
        return processes.run(
            [*namespaces.inside(host), *processes.python("-m", _PROGRAM)],
            mpiexec.TIMEOUT_SECONDS,
            env={
                **{**os.environ, **leader},
                **{"RANK": str(rank), "WORLD_SIZE": "2"},
            },
        )

    with namespaces.made(2) as hosts, futures.ThreadPoolExecutor(2) as pool:
        ended = [*pool.map(run, range(2), hosts)]
    errors = "".join(one.stderr[-3000:] for one in ended)
    assert not any(one.returncode for one in ended), errors
    text = "".join(one.stdout for one in ended)
    _check(text, [[0, 1]], _SUBGROUPS, report)


_BATCH = """#!/bin/bash
srun {job} {directory} preempt:1:7 requeue:0:15
code=$?
# One worker was asked to end, and all have saved.
if [ $code = 143 ]; then scontrol requeue $SLURM_JOB_ID; fi
exit $code
"""


def _run_batch(environment, folder):
    """Runs a batch job to its end; returns what it printed."""
    script, output = folder / "job.sh", folder / "out"
    job = processes.python("-m", "tests.programs.launched_job")
    script.write_text(
        _BATCH.format(job=" ".join(job), directory=folder / "saves")
    )

    def run(*command):
        return processes.run(command, 60, tensorflow=0, env=environment).stdout

    number = run(
        *("sbatch", "--parsable", "--requeue", "--open-mode=append"),
        *("-n", "2", "-o", str(output), str(script)),
    ).strip()
    deadline = time.monotonic() + 2 * mpiexec.TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        shown = run("scontrol", "show", "job", number)
        [state] = re.findall(r"JobState=(\w+)", shown) or [None]
        if state in ("COMPLETED", "FAILED", "CANCELLED"):
            return output.read_text() + shown
        if state == "PENDING":
            # Slurm waits two minutes before it starts a requeued job; one
            # that starts while its last run is being cleaned up fails.
            time.sleep(5)
            run("scontrol", "update", f"job={number}", "starttime=now")
        time.sleep(0.5)
    raise AssertionError(output.read_text()[-5000:])


def test_preempted_on_slurm(tmp_path):
    """SIGTERM to one worker, then a requeue: the undisturbed job's bits."""
    if not slurm.is_installed():
        pytest.skip("needs slurmctld")
    with slurm.running() as environment:
        text = _run_batch(environment, tmp_path)
    # Slurm may drop lines that a job prints while Slurm ends the job.
    codes = re.findall(r"All have saved .*exit code (\d+)", text)
    assert len(codes) >= 2 and set(codes) == {"143"}
    assert set(re.findall(r"started (\d)", text)) >= {"0", "2"}, text[-3000:]
    finals, undisturbed = (
        sorted(json.loads(one) for one in re.findall(rf"{word} (\[.*)", text))
        for word in ("final", "undisturbed")
    )
    assert [rank for rank, *_ in finals] == [0, 1], text[-5000:]
    assert finals == undisturbed
