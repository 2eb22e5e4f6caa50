"""MPI and Slurm start the processes: one device's numbers, on each.

`engines_test` has each engine's variables without starting it.
"""

import contextlib
import json
import os
import re
import subprocess
import time

import numpy as np
import pytest

from tests.programs import engine_program
from tests.support import mpiexec
from tests.support import namespaces
from tests.support import processes
from tests.support import slurm
from tf_xshard.multi_worker import local_cluster

pytestmark = pytest.mark.full
_ENVIRONMENT = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
_PROGRAM = "tests.programs.engine_program"
_SUBGROUPS = "subgroup collectives (CollectiveReduceV2)"


def _read(text):
    """What every process holds at the end, by rank."""
    return [rest for _, *rest in sorted(_printed(text))]


def _printed(text):
    """The JSON behind each word "final"; two may stand on one line."""
    decoder = json.JSONDecoder()
    return [
        decoder.raw_decode(text, found.end())[0]
        for found in re.finditer("final ", text)
    ]


def _on_one_device(num_replicas, members=None):
    """Weights and loss of one device, with the rows of a group's replicas."""
    x, y = engine_program.data()
    if members is not None:
        shape = [engine_program.NUM_STEPS, num_replicas, -1]
        x, y = (
            one.reshape([*shape, one.shape[1]])[:, members].reshape(
                [-1, one.shape[1]]
            )
            for one in (x, y)
        )
    network = engine_program.model()
    size = 16 if members is None else 16 * len(members) // num_replicas
    history = network.fit(x, y, batch_size=size, shuffle=False, verbose=0)
    return engine_program.weights(network), history.history["loss"]


def _check(finals, groups, path, report):
    [everyone] = {tuple(paths) for *_, paths in finals}
    assert everyone == (path,)
    for group in groups or [None]:
        weights, loss = _on_one_device(len(finals), group)
        members = group or range(len(finals))
        for rank in members:
            for got, expected in zip(finals[rank][0], weights, strict=True):
                np.testing.assert_allclose(got, expected, atol=1e-6)
        # All members have the same bits.
        assert len({str(finals[rank][0]) for rank in members}) == 1
        if group is None:
            np.testing.assert_allclose(finals[0][1], loss, rtol=1e-5)
    difference = max(
        np.max(np.abs(np.subtract(got, expected)))
        for got, expected in zip(
            finals[(groups or [[0]])[-1][0]][0], weights, strict=True
        )
    )
    report(f"{len(finals)} processes, {path}: {difference:.1e} from one device")


def test_mpiexec(report):
    groups = [[0, 2], [1, 3]]
    ended = mpiexec.run(4, _PROGRAM, json.dumps(groups), "auto")
    assert ended.returncode == 0, ended.stderr[-5000:]
    _check(_read(ended.stdout), groups, "MPI", report)


@pytest.fixture(scope="module")
def hosts():
    """The names of two hosts."""
    if not namespaces.are_allowed():
        pytest.skip("needs root")
    with namespaces.made(2) as names:
        yield names


def _on_hosts(hosts, command_of, variables_of=lambda rank: {}):
    """Runs a command on each host (None: this one); what they print."""
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                processes.started(
                    [
                        *(namespaces.inside(host) if host else ()),
                        *command_of(rank),
                    ],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=_ENVIRONMENT | variables_of(rank),
                )
            )
            for rank, host in enumerate(hosts)
        ]
        texts = [
            process.communicate(timeout=mpiexec.TIMEOUT_SECONDS)[0]
            for process in started
        ]
    assert not any(one.returncode for one in started), "".join(texts)[-5000:]
    return "".join(texts)


def test_launch_on_two_hosts(hosts, report):
    """TensorFlow listens at the port at which the hosts have met."""
    addresses = ",".join(f"{namespaces.address(r)}:4000" for r in range(2))

    def command_of(rank):
        options = ("--hosts", addresses, "--rank", str(rank))
        return processes.python(
            *("-m", "tf_xshard", "launch", *options),
            *("-m", _PROGRAM, "null", "auto"),
        )

    _check(_read(_on_hosts(hosts, command_of)), None, _SUBGROUPS, report)


def test_connect_on_two_hosts(hosts, shown):
    """Each is reached at the address from which it came."""

    def variables_of(rank):
        leader = namespaces.address(0)
        return {
            **{"RANK": str(rank), "WORLD_SIZE": "2"},
            **{"MASTER_ADDR": leader, "MASTER_PORT": "4000"},
        }

    text = _on_hosts(hosts, lambda rank: shown, variables_of)
    found = [json.loads(one)[0] for one in re.findall(r"final (.*)", text)]
    for one in found:
        addresses = one["cluster"]["worker"]
        assert [address.partition(":")[0] for address in addresses] == [
            namespaces.address(0),
            namespaces.address(1),
        ]
    assert found[0]["cluster"] == found[1]["cluster"]


def test_torchrun_variables(report):
    """On four plain processes."""
    [port] = local_cluster.free_ports(1)

    def variables_of(rank):
        return {
            **{"RANK": str(rank), "WORLD_SIZE": "4"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        }

    groups = [[0, 3], [1, 2]]
    command = processes.python("-m", _PROGRAM, json.dumps(groups), "auto")
    text = _on_hosts([None] * 4, lambda rank: command, variables_of)
    _check(_read(text), groups, _SUBGROUPS, report)


def test_the_environment_of_ray(report):
    """Ray sets TF_CONFIG, and calls the training function in a thread.

    As others do, it calls the first worker the chief here.
    """
    addresses = local_cluster.local_addresses(2)
    cluster = {"chief": addresses[:1], "worker": addresses[1:]}

    def variables_of(rank):
        task = {"index": 0, "type": "worker" if rank else "chief"}
        return {
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
            "TF_USE_LEGACY_KERAS": "1",
        }

    command = processes.python("-m", _PROGRAM, "null", "auto", "--thread")
    text = _on_hosts([None] * 2, lambda rank: command, variables_of)
    _check(_read(text), None, _SUBGROUPS, report)


@pytest.fixture
def shown(tmp_path):
    """A command that shows the TF_CONFIG of a script without connect()."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os; print('final', '[%s]' % os.environ['TF_CONFIG'])"
    )
    return processes.python(
        "-m", "tf_xshard", "launch", "--from-env", str(script)
    )


@pytest.fixture(scope="module")
def slurm_environment():
    if not slurm.is_installed():
        pytest.skip("needs slurmctld")
    with slurm.running() as environment:
        yield {**environment, "TF_CPP_MIN_LOG_LEVEL": "2"}


def _srun(environment, number, command):
    return processes.run(
        ["srun", "-n", str(number), *command],
        mpiexec.TIMEOUT_SECONDS,
        tensorflow=number,
        env=environment,
    )


def test_srun(slurm_environment, report):
    command = processes.python("-m", _PROGRAM, "null", "auto")
    ended = _srun(slurm_environment, 2, command)
    assert ended.returncode == 0, ended.stderr[-5000:]
    _check(_read(ended.stdout), None, _SUBGROUPS, report)


def test_tensorflow_s_own_resolver(slurm_environment):
    """Each knows its rank; without the strategy it would not."""
    code = """
import tensorflow as tf, tf_xshard
resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
    gpus_per_node=2, gpus_per_task=1, auto_set_gpu=False
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
print("rank", tf_xshard.rank(strategy), tf_xshard.is_chief(strategy))
try:
    tf_xshard.is_chief()
except ValueError as error:
    print(error)
"""
    ended = _srun(slurm_environment, 2, processes.python("-c", code))
    found = sorted(re.findall(r"rank (\d \w+)", ended.stdout))
    assert found == ["0 True", "1 False"], ended.stderr[-3000:]
    assert ended.stdout.count("2 processes (Slurm) would act alone") == 2


def test_srun_from_env(slurm_environment, shown):
    """A script that does not call connect()."""
    found = [
        one for [one] in _printed(_srun(slurm_environment, 4, shown).stdout)
    ]
    assert sorted(one["task"]["index"] for one in found) == [0, 1, 2, 3]
    assert len({str(one["cluster"]) for one in found}) == 1


_BATCH = """#!/bin/bash
srun {job} {directory} {faults}
code=$?
# One worker was asked to end, and all have saved.
if [ $code = 143 ]; then scontrol requeue $SLURM_JOB_ID; fi
exit $code
"""


def _run_batch(environment, tmp_path, *faults):
    """Runs a batch job to its end; returns what it printed."""
    script, output = tmp_path / "job.sh", tmp_path / "out"
    script.write_text(
        _BATCH.format(
            job=" ".join(processes.python("-m", "tests.programs.launched_job")),
            directory=tmp_path / "saves",
            faults=" ".join(faults),
        )
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


def test_preempted_on_slurm(slurm_environment, tmp_path):
    """SIGTERM to one worker, then a requeue: the undisturbed job's bits."""
    text = _run_batch(
        slurm_environment, tmp_path, "preempt:1:7", "requeue:0:15"
    )
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
