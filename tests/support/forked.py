"""Python programs that begin with TensorFlow imported: forked, not started.

The import takes most of the time of a small program. One process imports
TensorFlow and does nothing with it; each program is a fork of it, with its own
arguments, environment, directory and streams. `multiprocessing` has such
a server for its own functions, not for programs with pipes and signals.

Variables that are read while TensorFlow is imported, TF_CPP_MIN_LOG_LEVEL for
example, are those of that process.
"""

import atexit
import contextlib
import functools
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import types

from tests.support import paths

_LARGEST_REQUEST = 1 << 20
# A program's process id when it begins, and what `os.waitpid` says of its end.
_STATUS = struct.Struct("q")
# With a request come the program's stdin, stdout and stderr, and a pipe for its
# status.
_NUM_FDS = 4
# Tells children of a process which process imports for it.
_SERVER = "TF_XSHARD_TEST_FORKS"


_PlainPopen = subprocess.Popen


class Popen(_PlainPopen):
    """`subprocess.Popen` of `[sys.executable, "-m" or "-c", ...]`."""

    def _execute_child(self, args, *others):
        # In this order since Python 3.7; 3.11 has one more at the end.
        cwd, environment = others[4:6]
        ends = others[9:15]
        start_new_session = others[20]
        streams = ends[0], ends[3], ends[5]
        if args[0] != sys.executable or args[1] not in ("-m", "-c"):
            raise ValueError(f"not a Python program: {args}")
        self._status, status = os.pipe()
        request = {
            "arguments": [os.fspath(one) for one in args[1:]],
            "cwd": os.fspath(cwd or os.getcwd()),
            "environment": dict(
                os.environ if environment is None else environment
            ),
            "start_new_session": start_new_session,
        }
        request["environment"][_SERVER] = server()
        given = [
            own if fd == -1 else fd
            for fd, own in zip(streams, range(3), strict=True)
        ]
        with _socket() as connection:
            connection.connect(_abstract(server()))
            socket.send_fds(
                connection, [json.dumps(request).encode()], [*given, status]
            )
        os.close(status)
        self._child_created = True
        self._close_pipe_fds(*ends)
        self.pid = self._read_status()

    def _read_status(self):
        data = os.read(self._status, _STATUS.size)
        if not data:
            raise RuntimeError("the process that forks has ended")
        return _STATUS.unpack(data)[0]

    def _internal_poll(self, *args, **kwargs):
        return self._ended_within(0)

    def _ended_within(self, seconds):
        if self.returncode is None:
            if select.select([self._status], [], [], seconds)[0]:
                self._handle_exitstatus(self._read_status())
                os.close(self._status)
        return self.returncode

    def _wait(self, timeout):
        if self._ended_within(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode


def run(arguments, *, input=None, timeout=None, check=False, **kwargs):
    """`subprocess.run`."""
    if kwargs.pop("capture_output", False):
        kwargs.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if input is not None:
        kwargs["stdin"] = subprocess.PIPE
    with Popen(arguments, **kwargs) as process:
        try:
            stdout, stderr = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(
        arguments, process.returncode, stdout, stderr
    )
    if check:
        done.check_returncode()
    return done


@contextlib.contextmanager
def instead_of_started():
    """The programs that `subprocess` would start are forked."""
    subprocess.Popen = Popen
    try:
        yield
    finally:
        subprocess.Popen = _PlainPopen


@functools.cache
def server():
    """The process that imports, of this process and its children, by name."""
    if _SERVER in os.environ:
        return os.environ[_SERVER]
    name = f"tf_xshard_tests_{os.getpid()}"
    with _socket() as listener:
        listener.bind(_abstract(name))
        listener.listen()
        importing = _PlainPopen(
            [sys.executable, "-m", __name__, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            # Closed when this process ends.
            stdin=subprocess.PIPE,
            cwd=paths.ROOT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        )
    atexit.register(importing.communicate)
    os.environ[_SERVER] = name
    return name


def _socket():
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _abstract(name):
    """An address that is no file, and free again when nothing listens."""
    return f"\0{name}"


def _next_program(listener):
    """Forks a process for each request, and returns in that process only."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nothing waits for them.
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            os._exit(0)
        with listener.accept()[0] as connection:
            if _user_of(connection) != os.getuid():
                continue  # Any local user can connect.
            message, fds, _, _ = socket.recv_fds(
                connection, _LARGEST_REQUEST, _NUM_FDS
            )
        # One process waits for the program, and the program is its child.
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if program := os.fork():
                _tell_the_end(program, fds[-1])
            listener.close()
            return json.loads(message), fds
        for fd in fds:
            os.close(fd)


def _user_of(connection):
    """The user id of the process at the other end of a socket."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    return struct.unpack("3i", credentials)[1]


def _tell_the_end(program, status):
    # Not to hold the program's pipes open.
    os.closerange(0, status)
    os.write(status, _STATUS.pack(os.waitpid(program, 0)[1]))
    os._exit(0)


def _main(listener):
    # Importing it postpones Python's garbage collector: before TensorFlow.
    from tests.support import garbage

    # isort: split
    import keras
    import numpy as np
    import tensorflow as tf

    import tf_xshard
    from tests.support import iterators
    from tests.support import stack_traces

    del keras, tf, tf_xshard
    iterators.without_autotuning()
    stack_traces.not_recorded()
    garbage.resume()
    request, fds = _next_program(listener)
    if request["start_new_session"]:
        os.setsid()
    *streams, status = fds
    os.write(status, _STATUS.pack(os.getpid()))
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    np.random.seed()  # Python's `random` does so by itself.
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    kind, program, *arguments = request["arguments"]
    sys.path[0] = request["cwd"] if kind == "-m" else ""
    sys.argv = [kind, *arguments]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(program, vars(sys.modules["__main__"]))


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
