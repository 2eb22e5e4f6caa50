"""Starts every process of the tests, and leaves none of its group behind.

Imports neither TensorFlow nor pytest: programs that install packages use it.
"""

import contextlib
import os
import signal
import subprocess
import sys

from tests.support import paths

# How many processes that import TensorFlow this one has started, by itself or
# by the package's launchers. The budget of the suite counts them.
num_tensorflow = 0


def count(number):
    """Counts processes that code of the package starts for a test."""
    global num_tensorflow
    num_tensorflow += number


def python(*arguments):
    """The command that runs this Python."""
    return [sys.executable, *arguments]


@contextlib.contextmanager
def started(command, tensorflow=1, **options):
    """A process whose whole group is killed when the block is left.

    Args:
      command: What to run, in the project's folder.
      tensorflow: How many processes import TensorFlow, its children included.
      **options: Those of `subprocess.Popen`. Its text is decoded.

    Yields:
      The `subprocess.Popen`.
    """
    count(tensorflow)
    process = subprocess.Popen(
        command,
        start_new_session=True,
        **{"text": True, "cwd": paths.ROOT, **options},
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                # What was written to a process that has ended is lost anyway.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def run(command, seconds=540, check=False, given=None, **options):
    """Runs a process to its end, and kills its group after some seconds.

    Args:
      command: What to run.
      seconds: The limit.
      check: Whether another exit code than 0 fails the test, with the output.
      given: The text of its standard input, or None.
      **options: Those of `started`. Both outputs are pipes.

    Returns:
      A `subprocess.CompletedProcess`.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if given is not None:
        pipes["stdin"] = subprocess.PIPE
    with started(command, **{**pipes, **options}) as process:
        output, errors = process.communicate(given, timeout=seconds)
    ended = subprocess.CompletedProcess(
        process.args, process.returncode, output, errors
    )
    assert not check or ended.returncode == 0, (
        f"{command} ended with {ended.returncode}:\n"
        f"{(output or '')[-3000:]}\n{(errors or '')[-3000:]}"
    )
    return ended


def forked(function, output, seconds):
    """Calls a function in a copy of this process, and kills it in time.

    Args:
      function: What to call. Its result, an int, is the exit code.
      output: The path that both outputs are written to.
      seconds: The limit, an int.

    Returns:
      The exit code; after an exception or the limit, another one than 0.
    """
    process = os.fork()
    if not process:
        code = 70
        try:
            os.setsid()
            signal.alarm(seconds)
            with open(output, "wb") as file:
                for descriptor in (1, 2):
                    os.dup2(file.fileno(), descriptor)
            code = int(function())
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)
