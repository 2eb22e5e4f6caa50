"""Finds out what started this process: Slurm, MPI, torchrun and others.

Each engine tells a process its rank in environment variables. Imports no
TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping

# Where no engine gives the port at which rank 0 listens.
DEFAULT_PORT = 7777
_LOOPBACK = "127.0.0.1"
# Set to 1 if each process that an engine started should train alone.
ALONE = "TF_XSHARD_ALONE"

# Names the process that `connect` has joined to an engine's other processes.
# Its children also get the variable.
_CONNECTED = "TF_XSHARD_CONNECTED"
# The variables with which MPI's launchers give a process its rank.
_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
# The names of the engines that are MPI launchers.
MPI_ENGINES = ("Open MPI", "MPI")

Variables = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Place:
    """Describes the place of this process among an engine's processes.

    Attributes:
      engine: The engine's name, for messages.
      rank: The process's rank, from 0.
      size: The number of processes; None if the engine does not tell.
      leader: The host of rank 0; None if the engine does not tell.
      port: The port at which rank 0 listens during the exchange; None if the
        engine does not tell.
      restart: The number of times that the engine has restarted the job.
      job: A text that is equal in all processes of a job, and differs between
        jobs as far as the engine allows.
    """

    engine: str
    rank: int
    size: int | None
    leader: str | None
    port: int | None
    job: str
    restart: int = 0


def _torchrun(variables: Variables) -> Place | None:
    """Detects torchrun, and everything else that sets RANK and WORLD_SIZE."""
    return _of_torch(
        variables, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    )


def _kubeflow(variables: Variables) -> Place | None:
    """Detects Kubeflow's variables for torchrun, without a torchrun."""
    if variables.get("PET_NPROC_PER_NODE", "1") not in ("1", "auto"):
        return None
    return _of_torch(
        variables,
        "PET_NODE_RANK",
        "PET_NNODES",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
    )


def _of_torch(
    variables: Variables, rank: str, size: str, address: str, port: str
) -> Place | None:
    if not {rank, size} <= set(variables):
        return None
    # torchrun's own store listens at MASTER_PORT.
    taken = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(
        "torchrun",
        _integer(variables, rank),
        _integer(variables, size),
        variables.get(address),
        _integer(variables, port) + taken if port in variables else None,
        _joined(
            variables,
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_RESTART_COUNT",
            # Omit the address, for which processes may have different names.
            port,
        ),
        _integer(variables, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _open_mpi(variables: Variables) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" not in variables:
        return None
    return _of_mpi(
        variables,
        MPI_ENGINES[0],
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        # Open MPI 5 has a namespace, and Open MPI 4 has a number for each job.
        _joined(variables, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    )


def _pmi(variables: Variables) -> Place | None:
    """Detects MPICH, Intel MPI, and others that PMI starts."""
    if not {"PMI_RANK", "PMI_SIZE"} <= set(variables):
        return None
    # All processes of a host have the same launcher. Other hosts have another
    # launcher; MASTER_ADDR and MASTER_PORT then identify the job.
    parent = "" if "MASTER_ADDR" in variables else str(_launcher("PMI_RANK"))
    return _of_mpi(
        variables,
        MPI_ENGINES[1],
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALNRANKS",
        parent,
    )


def _of_mpi(
    variables: Variables,
    engine: str,
    rank: str,
    size: str,
    local_size: str,
    job: str,
) -> Place:
    leader = variables.get("MASTER_ADDR")
    if leader is None and variables.get(local_size) == variables[size]:
        leader = _LOOPBACK
    if "MASTER_PORT" in variables:
        port: int | None = _integer(variables, "MASTER_PORT")
    elif job:
        port = _port_of(job)
    else:
        port = DEFAULT_PORT
    return Place(
        engine,
        _integer(variables, rank),
        _integer(variables, size),
        leader,
        port,
        job + _joined(variables, "MASTER_PORT"),
        _integer(variables, "SLURM_RESTART_COUNT", 0),
    )


def _launcher(variable: str) -> int:
    """Returns the process that set a variable in this process's ancestors.

    A launcher may start a shell script, and the script starts Python.
    """
    pid = os.getppid()
    try:
        while f"{variable}=" in _text(f"/proc/{pid}/environ"):
            # The fields after the program's name, which may contain anything.
            status = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
            pid = int(status[1])
    except OSError:  # Only Linux has /proc, for this user's processes.
        pass
    return pid


def _text(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()


def _slurm(variables: Variables) -> Place | None:
    # Read the step's variables, since the job's variables (SLURM_NTASKS) are
    # also set if a batch script runs Python without srun.
    needed = {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"}
    if not needed <= set(variables):
        return None
    job = _joined(
        variables, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"
    )
    reserved = variables.get("SLURM_STEP_RESV_PORTS", "")
    first = re.match(r"\d+", reserved)
    return Place(
        "Slurm",
        _integer(variables, "SLURM_PROCID"),
        _integer(variables, "SLURM_STEP_NUM_TASKS"),
        _first_host(variables["SLURM_STEP_NODELIST"]),
        int(first[0]) if first else _port_of(job),
        job,
        _integer(variables, "SLURM_RESTART_COUNT", 0),
    )


def _sagemaker(variables: Variables) -> Place | None:
    if not {"SM_HOSTS", "SM_CURRENT_HOST"} <= set(variables):
        return None
    hosts = sorted(json.loads(variables["SM_HOSTS"]))
    own = variables["SM_CURRENT_HOST"]
    if own not in hosts:
        raise ValueError(
            f"SM_CURRENT_HOST={own} is not in SM_HOSTS={hosts}. Unset both if"
            " they are left over from another job."
        )
    return Place(
        "SageMaker",
        hosts.index(own),
        len(hosts),
        hosts[0],
        DEFAULT_PORT,
        _joined(variables, "TRAINING_JOB_NAME", "SM_HOSTS"),
    )


def _kubernetes(variables: Variables) -> Place | None:
    """Detects a pod of an indexed Job with a headless service."""
    if "JOB_COMPLETION_INDEX" not in variables:
        return None
    rank = _integer(variables, "JOB_COMPLETION_INDEX")
    # The pod's name is JOB-INDEX. In DNS, the service's name follows.
    full_name = socket.getfqdn(variables.get("HOSTNAME", ""))
    match = re.fullmatch(rf"(.*)-{rank}(\..*)?", full_name)
    leader = f"{match[1]}-0{match[2] or ''}" if match else None
    return Place(
        "Kubernetes", rank, None, leader, DEFAULT_PORT, leader or full_name
    )


# From the innermost to the outermost, since an engine may start another. Slurm
# starts one MPI daemon per host, and Kubernetes starts torchrun.
DETECTORS: tuple[Callable[[Variables], Place | None], ...] = (
    _torchrun,
    _kubeflow,
    _open_mpi,
    _pmi,
    _slurm,
    _sagemaker,
    _kubernetes,
)
# The engines that tell how many processes a step has.
_WITH_SIZE = (_torchrun, _kubeflow, _open_mpi, _pmi, _slurm)


def place(variables: Variables = os.environ) -> Place | None:
    """Returns this process's place, or None if no engine started it.

    Raises ValueError if a variable is not an integer, or the rank is not below
    the size.
    """
    own = _given(variables)
    first: Place | None = None
    for detector in DETECTORS:
        if first is not None and first.leader is not None:
            break
        other = detector(own)
        if first is None:
            first = other
        # Slurm can start MPI's processes itself. It knows all hosts.
        elif other is not None and (other.rank, other.size) == (
            first.rank,
            first.size,
        ):
            first = other
    if first is None:
        return None
    if first.size is not None and not 0 <= first.rank < first.size:
        raise ValueError(
            f"{first.engine} gives this process rank {first.rank} of"
            f" {first.size}, but ranks are from 0 to {first.size - 1}. Unset"
            " the variables if they are left over from another job."
        )
    return first


def connected() -> dict[str, str]:
    """Returns the variables that mark this process as connected."""
    return {_CONNECTED: str(os.getpid())}


def is_started_by_mpi(variables: Variables = os.environ) -> bool:
    """Returns True in a process that an MPI started and `connect` joined."""
    return variables.get(_CONNECTED) == str(os.getpid()) and any(
        name in variables for name in _MPI_RANKS
    )


def size_of_step(variables: Variables = os.environ) -> tuple[str, int]:
    """Returns the engine and the number of processes that it started.

    Returns `("", 1)` if the variables name no such engine.
    """
    own = _given(variables)
    for detector in _WITH_SIZE:
        if found := detector(own):
            return found.engine, found.size or 1
    return "", 1


@dataclasses.dataclass(frozen=True)
class Task:
    """Holds TF_CONFIG's type of this task, and the number that train."""

    type: str
    num_workers: int


def task(variables: Variables = os.environ) -> Task | None:
    """Returns the task of TF_CONFIG, or None without a cluster in it."""
    config = json.loads(variables.get("TF_CONFIG") or "{}")
    cluster = config.get("cluster")
    if not cluster:
        return None
    num_workers = sum(len(cluster.get(job, ())) for job in ("chief", "worker"))
    return Task(config.get("task", {}).get("type", "worker"), num_workers)


def _given(variables: Variables) -> Variables:
    """Omits empty variables, which shells use for "not set"."""
    return {name: value for name, value in variables.items() if value}


def _integer(
    variables: Variables, name: str, default: int | None = None
) -> int:
    if default is not None and name not in variables:
        return default
    try:
        return int(variables[name])
    except ValueError:
        raise ValueError(
            f"The environment variable {name} must be an integer, got"
            f" {variables[name]!r}."
        ) from None


def _joined(variables: Variables, *names: str) -> str:
    return ".".join(variables.get(name, "") for name in names)


def _first_host(hosts: str) -> str:
    """Returns the first host of Slurm's list, as "n01" of "n[01-02],m"."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    assert match is not None  # It may be empty.
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match[0])


def _port_of(text: str) -> int:
    """Returns a port below the range from which the kernel chooses ports."""
    return 20000 + zlib.crc32(text.encode()) % 10000
