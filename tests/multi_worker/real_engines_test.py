"""MPI and Slurm start the processes: one device's numbers, on each."""

import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.programs import engine_program
from tests.support import mpiexec
from tests.support import namespaces
from tests.support import paths
from tests.support import slurm
from tf_xshard.multi_worker import local_cluster

_ENVIRONMENT = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
_PROGRAM = "tests.programs.engine_program"
_SUBGROUPS = "subgroup collectives (CollectiveReduceV2)"


def _finals(command, environment=None):
    """What every process holds at the end, by rank."""
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=paths.ROOT,
        env=environment or _ENVIRONMENT,
        timeout=mpiexec.TIMEOUT_SECONDS,
    )
    return _read_ended(ended)


def _read_ended(ended):
    text = ended.stdout + ended.stderr
    assert ended.returncode == 0, text[-5000:]
    return _read(text)


def _read(text):
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


@pytest.mark.parametrize(
    "number, groups, transport, path",
    [
        (2, None, "mpi", "MPI"),
        (4, [[0, 2], [1, 3]], "auto", "MPI"),
    ],
)
def test_mpiexec(number, groups, transport, path, report):
    ended = mpiexec.run(number, _PROGRAM, json.dumps(groups), transport)
    _check(_read_ended(ended), groups, path, report)


@pytest.fixture(scope="module")
def hosts():
    """The names of two hosts."""
    if not namespaces.are_allowed():
        pytest.skip("needs root")
    with namespaces.made(2) as names:
        yield names


def _on_hosts(hosts, command_of, variables_of=lambda rank: {}):
    """Runs a command on each host (None: this one); what they print."""
    processes = [
        subprocess.Popen(
            [*(namespaces.inside(host) if host else ()), *command_of(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=paths.ROOT,
            env=_ENVIRONMENT | variables_of(rank),
        )
        for rank, host in enumerate(hosts)
    ]
    texts = [
        process.communicate(timeout=mpiexec.TIMEOUT_SECONDS)[0]
        for process in processes
    ]
    codes = [process.returncode for process in processes]
    assert codes == [0] * len(hosts), "".join(texts)[-5000:]
    return "".join(texts)


def test_launch_on_two_hosts(hosts, report):
    """TensorFlow listens at the port at which the hosts have met."""
    addresses = ",".join(f"{namespaces.address(r)}:4000" for r in range(2))

    def command_of(rank):
        launch = (sys.executable, "-m", "tf_xshard", "launch")
        options = ("--hosts", addresses, "--rank", str(rank))
        return [*launch, *options, "-m", _PROGRAM, "null", "auto"]

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
    command = [sys.executable, "-m", _PROGRAM, json.dumps(groups), "auto"]
    text = _on_hosts([None] * 4, lambda rank: command, variables_of)
    _check(_read(text), groups, _SUBGROUPS, report)


@pytest.mark.parametrize("has_chief", [False, True])
def test_the_environment_of_ray(has_chief, report):
    """Ray sets TF_CONFIG, and calls the training function in a thread.

    Others call the first worker the chief.
    """
    addresses = local_cluster.local_addresses(2)
    chief = {
        "cluster": {"chief": addresses[:1], "worker": addresses[1:]},
        "task": {"index": 0},
    }

    def variables_of(rank):
        chief["task"]["type"] = "worker" if rank else "chief"
        return {
            "TF_CONFIG": (
                json.dumps(chief)
                if has_chief
                else local_cluster.tf_config(addresses, rank)
            ),
            "TF_USE_LEGACY_KERAS": "1",
        }

    command = [sys.executable, "-m", _PROGRAM, "null", "auto", "--thread"]
    text = _on_hosts([None] * 2, lambda rank: command, variables_of)
    _check(_read(text), None, _SUBGROUPS, report)


@pytest.fixture
def shown(tmp_path):
    """A command that shows the TF_CONFIG of a script without connect()."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os; print('final', '[%s]' % os.environ['TF_CONFIG'])"
    )
    launch = (sys.executable, "-m", "tf_xshard", "launch")
    return [*launch, "--from-env", str(script)]


@pytest.fixture(scope="module")
def slurm_environment():
    if not slurm.is_installed():
        pytest.skip("needs slurmctld")
    with slurm.running() as environment:
        yield {**environment, "TF_CPP_MIN_LOG_LEVEL": "2"}


def test_srun(slurm_environment, report):
    command = ["srun", "-n", "2", sys.executable, "-m", _PROGRAM]
    command += ["null", "auto"]
    _check(_finals(command, slurm_environment), None, _SUBGROUPS, report)


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
    ended = subprocess.run(
        ["srun", "-n", "2", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=paths.ROOT,
        env=slurm_environment,
        timeout=mpiexec.TIMEOUT_SECONDS,
    )
    found = sorted(re.findall(r"rank (\d \w+)", ended.stdout))
    assert found == ["0 True", "1 False"], ended.stderr[-3000:]
    assert ended.stdout.count("2 processes (Slurm) would act alone") == 2


def test_srun_from_env(slurm_environment, shown):
    """A script that does not call connect()."""
    ended = subprocess.run(
        ["srun", "-n", "4", *shown],
        capture_output=True,
        text=True,
        cwd=paths.ROOT,
        env=slurm_environment,
        timeout=mpiexec.TIMEOUT_SECONDS,
    )
    found = [one[0] for one in _printed(ended.stdout)]
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
    directory = tmp_path / f"saves{len(faults)}"
    script, output = tmp_path / "job.sh", tmp_path / f"out{len(faults)}"
    job = f"{sys.executable} -m tests.programs.launched_job"
    script.write_text(
        _BATCH.format(job=job, directory=directory, faults=" ".join(faults))
    )
    submitted = subprocess.run(
        [
            *("sbatch", "--parsable", "--requeue", "--open-mode=append"),
            *("-n", "2", "-o", str(output), str(script)),
        ],
        capture_output=True,
        text=True,
        cwd=paths.ROOT,
        env=environment,
        check=True,
    )
    number = submitted.stdout.strip()
    deadline = time.monotonic() + mpiexec.TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        shown = subprocess.run(
            ["scontrol", "show", "job", number],
            capture_output=True,
            text=True,
            env=environment,
        ).stdout
        [state] = re.findall(r"JobState=(\w+)", shown) or [None]
        if state in ("COMPLETED", "FAILED", "CANCELLED"):
            return output.read_text() + shown
        if state == "PENDING":
            # Slurm waits two minutes before it starts a requeued job; one
            # that starts while its last run is being cleaned up fails.
            time.sleep(5)
            subprocess.run(
                ["scontrol", "update", f"job={number}", "starttime=now"],
                capture_output=True,
                env=environment,
            )
        time.sleep(0.5)
    raise AssertionError(output.read_text()[-5000:])


def test_preempted_on_slurm(slurm_environment, tmp_path):
    """SIGTERM to one worker, then a requeue: the undisturbed job's bits."""
    undisturbed = _run_batch(slurm_environment, tmp_path)
    text = _run_batch(
        slurm_environment, tmp_path, "preempt:1:7", "requeue:0:15"
    )
    # Slurm may drop lines that a job prints while Slurm ends the job.
    codes = re.findall(r"All have saved .*exit code (\d+)", text)
    assert len(codes) >= 2 and set(codes) == {"143"}
    assert set(re.findall(r"started (\d)", text)) >= {"0", "2"}, text[-3000:]
    finals = [
        {
            rank: rest
            for rank, *rest in map(json.loads, re.findall(r"final (.*)", one))
        }
        for one in (undisturbed, text)
    ]
    assert sorted(finals[0]) == [0, 1], undisturbed[-5000:]
    assert finals[0] == finals[1]
