"""v1's AGNOptimizer over gRPC: a parameter server and two workers."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.programs import agn_cluster_program as program
from tests.support import paths
from tf_xshard.multi_worker import local_cluster

_SECONDS = 240
_NUM_STEPS = 200


@pytest.fixture
def start():
    """A function that starts a worker; a parameter server runs already."""
    ports = local_cluster.free_ports(3)
    names = [f"127.0.0.1:{port}" for port in ports]
    cluster = json.dumps({"ps": names[:1], "worker": names[1:]})
    processes = []

    def started(job, index, num_steps):
        program_name = "tests.programs.agn_cluster_program"
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", program_name, job, str(index), cluster]
                + [str(num_steps)],
                cwd=paths.ROOT,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return processes[-1]

    def late(*_):  # No read waits forever.
        raise TimeoutError("the cluster")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(_SECONDS)
    started("ps", 0, 0)
    yield lambda index, num_steps: started("worker", index, num_steps)
    signal.alarm(0)
    for process in processes:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _release(process):
    process.stdin.write("\n")
    process.stdin.flush()


def _read(process):
    """The next line of a worker's output."""
    line = process.stdout.readline()
    assert line, "it has ended"
    return json.loads(line)


def _rest(process):
    lines = [json.loads(line) for line in process.stdout]
    assert process.wait() == 0
    return lines


def _accuracy(centers):
    x, y = program.data()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        _, accuracy = program.model(tf.constant(x), tf.constant(y))
        for variable in tf.compat.v1.global_variables():
            variable.load(np.array(centers[variable.op.name]), session)
        return session.run(accuracy)


def test_workers_train_one_center_and_one_that_was_killed_adopts_it(
    start, report
):
    chief = start(0, _NUM_STEPS)
    killed = start(1, 100_000)
    first = _read(chief)
    assert first["apart"] == first["accumulated"] == 0 and first["size"] > 0
    _release(killed)
    while _read(killed).get("step", 0) < 12:
        pass
    killed.kill()
    killed.wait()
    # It comes back while nobody changes the center: the chief waits.
    again = start(1, _NUM_STEPS)
    _release(again)
    first_again = _read(again)
    assert first_again["apart"] == first_again["accumulated"] == 0
    assert first_again["size"] != first["size"]
    assert first_again["global_step"] >= 12 // program.PERIOD
    # Both train, and no exchange is lost.
    _release(chief)
    output = [_rest(chief), _rest(again)]
    for lines in output:
        assert lines[-2]["step"] == _NUM_STEPS - 1
    last = max((lines[-1] for lines in output), key=lambda x: x["global_step"])
    assert last["devices"] == ["/job:ps/task:0"]
    num_exchanges = last["global_step"] - first_again["global_step"]
    assert num_exchanges == 2 * _NUM_STEPS // program.PERIOD
    accuracy = _accuracy(last["centers"])
    report(f"AGN, two workers over gRPC: accuracy of the center {accuracy:.3f}")
    assert accuracy > 0.9
    zeros = {k: np.zeros_like(v) for k, v in last["centers"].items()}
    assert _accuracy(zeros) < 0.2
