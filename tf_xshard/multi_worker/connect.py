"""Joins the processes that an engine started, and sets TF_CONFIG in each."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence

from absl import logging

from tf_xshard import checks
from tf_xshard.distribute import engines
from tf_xshard.multi_worker import exchange
from tf_xshard.multi_worker import local_cluster

TIMEOUT_SECONDS = 300.0
# Enough for a host name, a port and a token.
_MPI_BYTES = 512
_SECONDS_BETWEEN_TESTS = 0.01


def connect(
    timeout_seconds: float = TIMEOUT_SECONDS,
    *,
    num_workers: int | None = None,
    leader: str | None = None,
    port: int | None = None,
    alone: bool = False,
) -> None:
    """Joins the processes that `srun`, `mpiexec`, torchrun or a Job started.

    Call it at the start of the program, before
    `tf.distribute.MultiWorkerMirroredStrategy()`. It reads the rank and the
    size from the engine's environment variables, exchanges addresses through
    rank 0, and sets TF_CONFIG. The engines are Slurm, Open MPI, MPICH and other
    MPIs with PMI, torchrun (and everything that sets RANK and WORLD_SIZE),
    SageMaker and Kubernetes' indexed Jobs. If TF_CONFIG is set, or if no engine
    started this process, `connect` does nothing, so a script can always call
    it.

    Processes on one machine share its cores. If TF_NUM_INTRAOP_THREADS is not
    set, `connect` sets it to a process's share. On Linux, a process that has
    joined others keeps freed memory for its next step, as under
    `python -m tf_xshard launch`.

    Args:
      timeout_seconds: The seconds to wait for the other processes. Default:
        300.
      num_workers: The number of processes. Required in a Kubernetes Job, whose
        pods do not know the Job's `completions`. With other engines, it must
        equal the engine's number. Default: None, the engine's number.
      leader: The host name or IPv4 address of rank 0. Default: None, the host
        that the engine names.
      port: The port at which rank 0 listens until all processes have connected.
        Default: None, the engine's port, or else a number derived from the job.
      alone: Whether each process trains alone, as in the runs of a sweep. If
        True, the process joins no others, and training alone does not raise an
        error. Default: False.

    Raises:
      TypeError, ValueError: If an argument is invalid or contradicts the
        engine, or if the engine does not provide a required value.
      RuntimeError: In all processes that take part, if a process does not
        connect in time, two processes have the same rank, or their sizes
        differ. The message names these processes.

    Example:

    >>> tf_xshard.connect()
    >>> strategy = tf.distribute.MultiWorkerMirroredStrategy()

    Source: `jax.distributed.initialize`.
    """
    timeout_seconds = checks.positive_number("timeout_seconds", timeout_seconds)
    if num_workers is not None:
        num_workers = checks.count("num_workers", num_workers, None)
    if port is not None and not 0 < checks.integer("port", port) < 1 << 16:
        raise ValueError(f"port must be from 1 to 65535, got {port}.")
    if checks.boolean("alone", alone):
        os.environ[engines.ALONE] = "1"
        return
    if os.environ.get(engines.ALONE) == "1":
        logging.info(
            "tf_xshard.connect: trains alone, since %s=1 is set", engines.ALONE
        )
        return
    if engines.task() is not None:
        logging.info(
            "tf_xshard.connect: TF_CONFIG is set already; nothing was changed"
        )
        return
    place = found_place(num_workers, leader, port)
    if place is None:
        logging.info("tf_xshard.connect: one process, not started by an engine")
        return
    if place.leader is None or place.port is None:
        place = _completed_by_mpi(place, timeout_seconds)
    members = exchange.exchange(place, timeout_seconds)
    for name, value in environment(place, members).items():
        os.environ[name] = value
    for name, value in local_cluster.KEEPS_FREED_MEMORY.items():
        os.environ.setdefault(name, value)
    local_cluster.keep_freed_memory()
    logging.info(
        "tf_xshard.connect: rank %d of %d, started by %s",
        place.rank,
        len(members),
        place.engine,
    )


def found_place(
    num_workers: int | None = None,
    leader: str | None = None,
    port: int | None = None,
) -> engines.Place | None:
    """Returns this process's place, completed by the given arguments.

    Returns None for a process that runs alone. The place's leader and port may
    be None.
    """
    place = engines.place()
    if place is None:
        if num_workers not in (None, 1):
            raise ValueError(
                f"num_workers={num_workers}, but the environment variables name"
                " no engine that started this process, so it has no rank. Start"
                " it with srun, mpiexec, torchrun or `python -m tf_xshard"
                " launch`, or set RANK, WORLD_SIZE, MASTER_ADDR and"
                " MASTER_PORT."
            )
        return None
    if place.size is None and num_workers is None:
        raise ValueError(
            f"{place.engine} does not tell a process how many processes there"
            " are. Pass their number, such as a Job's completions:"
            " tf_xshard.connect(num_workers=4). If each process trains alone,"
            " call tf_xshard.connect(alone=True)."
        )
    if num_workers not in (None, place.size) and place.size is not None:
        raise ValueError(
            f"num_workers={num_workers}, but {place.engine} started"
            f" {place.size} processes. Leave num_workers out."
        )
    place = dataclasses.replace(
        place,
        size=place.size or num_workers,
        leader=leader or place.leader,
        port=port or place.port,
    )
    if place.rank >= (place.size or 1):
        raise ValueError(
            f"num_workers={num_workers}, but {place.engine} gives this process"
            f" rank {place.rank}. Pass the total number of processes."
        )
    return place if place.size != 1 else None


def refuse_without_leader(place: engines.Place) -> None:
    """Raises ValueError if the address of rank 0 is unknown."""
    if place.leader is None or place.port is None:
        raise ValueError(
            f"{place.engine} does not tell where rank 0 is. Set MASTER_ADDR"
            " (its host) and MASTER_PORT, or call"
            " tf_xshard.connect(leader=..., port=...), with the same values in"
            " all processes. If MPI started the processes, you can instead"
            " install mpi4py and call tf_xshard.connect()."
        )


def _completed_by_mpi(
    place: engines.Place, timeout_seconds: float
) -> engines.Place:
    """Asks MPI for the address of rank 0, if MPI started the processes."""
    is_mpi = place.engine in engines.MPI_ENGINES
    if not is_mpi or importlib.util.find_spec("mpi4py") is None:
        refuse_without_leader(place)
        return place
    world = importlib.import_module("mpi4py.MPI").COMM_WORLD
    if (world.rank, world.size) != (place.rank, place.size):
        raise ValueError(
            f"{place.engine} started this process as rank {place.rank} of"
            f" {place.size}, but it is rank {world.rank} of {world.size} for"
            " mpi4py, which was built with another MPI. Build mpi4py with this"
            " MPI (pip install --no-binary mpi4py mpi4py), or set MASTER_ADDR"
            " and MASTER_PORT."
        )
    with socket.socket() as one:
        one.bind(("", 0))
        port = one.getsockname()[1]
    said = json.dumps([socket.gethostname(), port, secrets.token_hex()])
    buffer = bytearray(said.encode().ljust(_MPI_BYTES))
    request = world.Ibcast(buffer)
    deadline = time.monotonic() + timeout_seconds
    while not request.Test():
        if time.monotonic() > deadline:
            raise exchange.JobError(
                f"MPI did not tell rank {place.rank} of {place.size} where rank"
                f" 0 is within {timeout_seconds:g} s. Some processes have not"
                " called tf_xshard.connect(). Call it in all of them."
            )
        time.sleep(_SECONDS_BETWEEN_TESTS)
    leader, port, job = json.loads(buffer)
    return dataclasses.replace(place, leader=leader, port=port, job=job)


def environment(
    place: engines.Place, members: Sequence[exchange.Member]
) -> dict[str, str]:
    """Returns the environment variables of a process that has connected."""
    own = members[place.rank]
    # Slurm and MPI may have given each process its own cores.
    num_sharing = sum(
        one.host == own.host and not set(own.cores).isdisjoint(one.cores)
        for one in members
    )
    threads = local_cluster.threads(num_sharing)
    return {
        **{k: v for k, v in threads.items() if k not in os.environ},
        **engines.connected(),
        "TF_CONFIG": local_cluster.tf_config(
            [one.address for one in members], place.rank
        ),
        # `launch` also counts restarts in this variable.
        "TF_XSHARD_RESTART": str(place.restart),
    }
