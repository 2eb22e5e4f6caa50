"""The launcher of the MPI in this environment: MPICH of [test], or Open MPI."""

import json
import os
import pathlib
import re
import shutil
import sys
import sysconfig
import tempfile

from tests.support import processes

TIMEOUT_SECONDS = 150
# Open MPI as root, and with more processes than cores.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def is_open_mpi():
    """Whether the environment's MPI is Open MPI."""
    return pathlib.Path(sysconfig.get_path("scripts"), "ompi_info").exists()


def command(number, module, *arguments):
    """What starts a module in so many processes."""
    found = shutil.which("mpiexec", path=sysconfig.get_path("scripts"))
    assert found is not None, "the extra [test] has mpich"
    return [found, "-n", str(number), sys.executable, "-m", module, *arguments]


def run(number, module, *arguments):
    """Runs a module in so many processes, as `run_command` does."""
    return run_command(command(number, module, *arguments), number)


def run_command(launch, tensorflow):
    """Runs it to its end; each process prints into a file of its own.

    `mpiexec` itself may put the lines of two processes into one.
    """
    launcher, *rest = launch
    with tempfile.TemporaryDirectory() as directory:
        files = (
            ["--output", f"file={directory}/out"]
            if is_open_mpi()
            else [f"-outfile-pattern={directory}/%r"]
        )
        ended = processes.run(
            [launcher, *files, *rest],
            TIMEOUT_SECONDS,
            tensorflow=tensorflow,
            env={**OPEN_MPI, **os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        )
        ended.stdout = ""
        for file in pathlib.Path(directory).iterdir():
            if file.suffix == ".err":
                ended.stderr += file.read_text()
            else:
                ended.stdout += file.read_text()
    return ended


def printed(ended):
    """The JSON objects that its processes have printed."""
    return [
        json.loads(one) for one in re.findall(r"^\{.*\}$", ended.stdout, re.M)
    ]
