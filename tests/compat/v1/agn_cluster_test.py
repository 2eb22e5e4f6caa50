"""v1's AGNOptimizer over gRPC: a parameter server and two workers."""

import json
import os
import signal
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import tensorflow as tf

from tests.programs import agn_cluster_program as program
from tests.support import paths
from tf_xshard.multi_worker import local_cluster

_SECONDS = 240


class _Cluster:
    def __init__(self, num_steps):
        ports = local_cluster.free_ports(3)
        names = [f"127.0.0.1:{port}" for port in ports]
        self._cluster = json.dumps({"ps": names[:1], "worker": names[1:]})
        self._num_steps = num_steps
        self._errors = tempfile.TemporaryFile("w+")
        self.processes = [self.start("ps", 0)]

    def start(self, job, index, num_steps=None):
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.programs.agn_cluster_program",
                job,
                str(index),
                self._cluster,
                str(num_steps or self._num_steps),
            ],
            cwd=paths.ROOT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        if job != "ps":
            self.processes.append(process)
        return process

    def start_both(self, num_steps=None):
        """Two workers that begin together; the chief's first line besides."""
        chief, second = (self.start("worker", k, num_steps) for k in range(2))
        first_line = self.read(chief)
        for worker in (chief, second):
            worker.stdin.write("\n")
            worker.stdin.flush()
        return chief, second, first_line

    def read(self, process):
        """The next line of a worker's output."""
        line = process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise AssertionError(self._errors.read()[-3000:])
        return json.loads(line)

    def rest(self, process):
        output, _ = process.communicate(timeout=_SECONDS)
        assert process.returncode == 0
        return [json.loads(line) for line in output.splitlines()]

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
        self._errors.close()


@pytest.fixture
def cluster(request):
    made = _Cluster(request.param)

    def late(*_):  # No read waits forever.
        raise TimeoutError("the cluster")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(_SECONDS)
    yield made
    signal.alarm(0)
    made.close()


def _accuracy(centers):
    x, y = program.data()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        _, accuracy = program.model(tf.constant(x), tf.constant(y))
        for variable in tf.compat.v1.global_variables():
            variable.load(np.array(centers[variable.op.name]), session)
        return session.run(accuracy)


@pytest.mark.parametrize("cluster", [200], indirect=True)
def test_two_workers_train_one_center(cluster, report):
    chief, second, first_line = cluster.start_both()
    output = [[first_line, *cluster.rest(chief)], cluster.rest(second)]
    last = max(output, key=lambda lines: lines[-1]["global_step"])[-1]
    assert last["devices"] == ["/job:ps/task:0"]
    assert last["global_step"] == 2 * 200 // program.PERIOD
    for lines in output:
        assert lines[0]["accumulated"] == 0
    assert output[0][0]["apart"] == 0 and output[0][0]["size"] > 0
    accuracy = _accuracy(last["centers"])
    report(f"AGN, two workers over gRPC: accuracy of the center {accuracy:.3f}")
    assert accuracy > 0.9
    assert (
        _accuracy({k: np.zeros_like(v) for k, v in last["centers"].items()})
        < 0.2
    )


@pytest.mark.parametrize("cluster", [40], indirect=True)
def test_a_worker_that_was_killed_adopts_the_center(cluster):
    chief, second, _ = cluster.start_both(100_000)
    while cluster.read(second).get("step", 0) < 12:
        pass
    second.kill()
    second.wait()
    # It comes back, trains on beside the chief, and comes to its end.
    again = cluster.rest(cluster.start("worker", 1))
    assert again[0]["accumulated"] == 0
    assert again[0]["global_step"] >= 12 // program.PERIOD
    assert again[-2]["step"] == 39
    # Once more, with nobody who changes the center meanwhile.
    chief.kill()
    chief.wait()
    last = cluster.rest(cluster.start("worker", 1))
    start, end = last[0], last[-1]
    assert start["apart"] == 0 and start["accumulated"] == 0
    assert start["global_step"] >= again[-1]["global_step"]
    assert end["global_step"] == start["global_step"] + 40 // program.PERIOD
    assert _accuracy(end["centers"]) > 0.5
