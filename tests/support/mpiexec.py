"""The launcher of the MPI that the extra [test] brings."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile

from tests.support import paths

TIMEOUT_SECONDS = 400


def command(number, module, *arguments):
    """What starts a module in so many processes."""
    found = shutil.which("mpiexec", path=sysconfig.get_path("scripts"))
    assert found is not None, "the extra [test] has mpich"
    return [found, "-n", str(number), sys.executable, "-m", module, *arguments]


def run(number, module, *arguments):
    """Runs a module in so many processes, as `run_command` does."""
    return run_command(command(number, module, *arguments))


def run_command(launch):
    """Runs it to its end; each process prints into a file of its own.

    `mpiexec` itself may put the lines of two processes into one.
    """
    launcher, *rest = launch
    with tempfile.TemporaryDirectory() as directory:
        ended = subprocess.run(
            [launcher, f"-outfile-pattern={directory}/%r", *rest],
            stderr=subprocess.PIPE,
            text=True,
            cwd=paths.ROOT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            timeout=TIMEOUT_SECONDS,
        )
        ended.stdout = "".join(
            file.read_text() for file in pathlib.Path(directory).iterdir()
        )
    return ended


def printed(ended):
    """The JSON objects that its processes have printed."""
    return [
        json.loads(one) for one in re.findall(r"^\{.*\}$", ended.stdout, re.M)
    ]
