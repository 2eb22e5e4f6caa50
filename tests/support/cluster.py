"""Runs a test's programs in processes that have TensorFlow imported already.

One process imports the program's module, and TensorFlow with it, and only then
divides: into the workers of a cluster, or into programs that run side by side.
"""

import contextlib
import functools
import importlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

from tests.support import processes
from tf_xshard.multi_worker import local_cluster

# What the others may need after one has failed, to say what they see of it.
_SECONDS_AFTER_A_FAILURE = 20


def once(function):
    """The function's result, and its error for each test that asks for it.

    A fixture that fails would be an error, and not the failure of a test.
    """

    @functools.cache
    def outcome():
        try:
            return function(), None
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return None, str(error)

    def result():
        value, error = outcome()
        assert error is None, error
        return value

    return result


def results_of(program, num_workers, arguments=(), seconds=300):
    """What `main` of a module returns on each worker, by rank."""
    addresses = local_cluster.local_addresses(num_workers)
    jobs = [
        (
            "main",
            arguments,
            {"TF_CONFIG": local_cluster.tf_config(addresses, r)},
        )
        for r in range(num_workers)
    ]
    found = _run(program, jobs, seconds, local_cluster.settings(num_workers))
    results, said = zip(*found, strict=True)
    # The first cause may be in any of them.
    assert None not in results, "\n".join(one[-3000:] for one in said)
    return results


def attempted(cases, *arguments):
    """What each function returns, and how it failed, by its name."""
    found = {}
    for case in cases:
        try:
            found[case.__name__] = [case(*arguments), None]
        except Exception:
            found[case.__name__] = [None, traceback.format_exc()]
    return found


def cases_of(program, *arguments):
    """A function: what one of `main`'s cases returned on each worker."""
    launched = once(lambda: results_of(program, *arguments))

    def of(name):
        values, errors = zip(*(one[name] for one in launched()), strict=True)
        assert not any(errors), "\n".join(filter(None, errors))
        return [*values]

    return of


def each_of(program, names, seconds):
    """What functions of a module return, and what they have printed, by name.

    A function that fails, or has not ended after so many seconds, has None.
    """
    jobs = [(name, (), {}) for name in names]
    return dict(zip(names, _run(program, jobs, seconds, {}), strict=True))


def _run(program, jobs, seconds, environment):
    """The result (None: failed) of each job, and what it has printed."""
    with tempfile.TemporaryDirectory() as directory:
        ended = processes.run(
            processes.python("-m", "tests.support.cluster", directory, program),
            seconds + 120,
            given=json.dumps([seconds, jobs]),
            env={"PYTHONUNBUFFERED": "1", **os.environ, **environment},
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        return [
            _outcome(pathlib.Path(directory, str(i))) for i in range(len(jobs))
        ]


def _outcome(file):
    result = json.loads(file.read_text()) if file.exists() else None
    return result, file.with_suffix(".txt").read_text("utf8", "replace")


def _work(function, arguments, file):
    """What a process does: its result is complete once its file exists."""
    output = os.open(file.with_suffix(".txt"), os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        result = json.dumps(function(*arguments))
        file.with_suffix(".part").write_text(result)
        file.with_suffix(".part").rename(file)
        # The others may still need this one.
        time.sleep(3600)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _main(directory, program):
    seconds, jobs = json.load(sys.stdin)
    module = importlib.import_module(program)
    files = {}
    for index, (name, arguments, environment) in enumerate(jobs):
        file = pathlib.Path(directory, str(index))
        if not (pid := os.fork()):
            os.environ.update(environment)
            _work(getattr(module, name), arguments, file)
        files[pid] = file
    deadline = time.monotonic() + seconds
    running = dict(files)
    is_cluster = any(environment for _, _, environment in jobs)
    while time.monotonic() < deadline:
        if all(file.exists() for file in running.values()):
            break
        ended, _ = os.waitpid(-1, os.WNOHANG)
        if running.pop(ended, None) and is_cluster:
            after = time.monotonic() + _SECONDS_AFTER_A_FAILURE
            deadline = min(deadline, after)
        time.sleep(0.05)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        # What they have cost is the test's, once they are waited for.
        os.waitpid(pid, 0)
    os._exit(0)


def bytes_sent():
    """Bytes that this process has sent over its TCP connections."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    # Of Linux' `tcp_info`: tcpi_bytes_sent and _retrans.
                    info = one.getsockopt(
                        socket.IPPROTO_TCP, socket.TCP_INFO, 216
                    )
                    sent, again = memoryview(info[200:216]).cast("Q")
                    total += sent - again
    return total


if __name__ == "__main__":
    _main(*sys.argv[1:])
