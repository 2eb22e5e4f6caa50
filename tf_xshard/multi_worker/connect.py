"""Joins the processes that an engine started: sets TF_CONFIG in each."""

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
# More than a host name, a port and a token.
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
    `tf.distribute.MultiWorkerMirroredStrategy()`. It finds rank and size in
    the variables of the engine, exchanges addresses by way of rank 0, and sets
    TF_CONFIG. The engines are Slurm, Open MPI, MPICH and other MPIs with PMI,
    torchrun (and everything that sets RANK and WORLD_SIZE), SageMaker and
    Kubernetes' indexed Jobs. If TF_CONFIG is set, or no engine started this
    process, it does nothing, so a script can always call it.

    Processes of one machine share its cores: unless it is set,
    TF_NUM_INTRAOP_THREADS gets a process's share. On Linux, a process that
    has joined others keeps freed memory for its next step, as under
    `python -m tf_xshard launch`.

    Args:
      timeout_seconds: How long to wait for the other processes. Default: 300.
      num_workers: The number of processes. Needed in a Kubernetes Job, whose
        pods do not know its `completions`. With other engines it is checked.
        Default: None, as the engine says.
      leader: The host name or IPv4 address of rank 0. Default: None, as the
        engine says.
      port: The port at which rank 0 listens until all have connected. Default:
        None, as the engine says, or else a number derived from the job.
      alone: True if each process is to train by itself, such as the runs of a
        sweep: it joins none, and training alone is not refused. Default: False.

    Raises:
      TypeError, ValueError: If an argument is invalid or contradicts the
        engine, or the engine does not tell what is needed.
      RuntimeError: In all processes that take part, if one does not connect in
        time, two have one rank, or their sizes differ. Names them.

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
        logging.info("tf_xshard.connect: alone, as %s=1 says", engines.ALONE)
        return
    if engines.task() is not None:
        logging.info("tf_xshard.connect: TF_CONFIG is set, and left as it is.")
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
    """Returns this process's place, completed by arguments that are given.

    None for a process that is alone. The leader and the port may be None.
    """
    place = engines.place()
    if place is None:
        if num_workers not in (None, 1):
            raise ValueError(
                f"num_workers={num_workers}, but the environment variables name"
                " no engine that started this process, and so no rank. Start it"
                " by srun, mpiexec or torchrun, or by `python -m tf_xshard"
                " launch`, or set RANK, WORLD_SIZE, MASTER_ADDR and"
                " MASTER_PORT."
            )
        return None
    if place.size is None and num_workers is None:
        raise ValueError(
            f"{place.engine} does not tell a process how many there are. Pass"
            " the number, such as a Job's completions:"
            " tf_xshard.connect(num_workers=4); or"
            " tf_xshard.connect(alone=True) if each trains by itself."
        )
    if num_workers not in (None, place.size) and place.size is not None:
        raise ValueError(
            f"num_workers={num_workers}, but {place.engine} started"
            f" {place.size} processes."
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
            f" rank {place.rank}. Pass the number of all processes."
        )
    return place if place.size != 1 else None


def refuse_without_leader(place: engines.Place) -> None:
    """Raises ValueError if it is not known where rank 0 is."""
    if place.leader is None or place.port is None:
        raise ValueError(
            f"{place.engine} does not tell where rank 0 is. Set MASTER_ADDR"
            " (its host) and MASTER_PORT, or pass"
            " tf_xshard.connect(leader=..., port=...), the same in all"
            " processes. Processes of MPI that call tf_xshard.connect() need"
            " only mpi4py."
        )


def _completed_by_mpi(
    place: engines.Place, timeout_seconds: float
) -> engines.Place:
    """Asks MPI where rank 0 is, if MPI started the processes."""
    is_mpi = place.engine in engines.MPI_ENGINES
    if not is_mpi or importlib.util.find_spec("mpi4py") is None:
        refuse_without_leader(place)
        return place
    world = importlib.import_module("mpi4py.MPI").COMM_WORLD
    if (world.rank, world.size) != (place.rank, place.size):
        raise ValueError(
            f"{place.engine} started this process as rank {place.rank} of"
            f" {place.size}, but it is rank {world.rank} of {world.size} for"
            " mpi4py, which was built with another MPI. Build it with this one"
            " (pip install --no-binary mpi4py mpi4py), or set MASTER_ADDR and"
            " MASTER_PORT."
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
                " called tf_xshard.connect()."
            )
        time.sleep(_SECONDS_BETWEEN_TESTS)
    leader, port, job = json.loads(buffer)
    return dataclasses.replace(place, leader=leader, port=port, job=job)


def environment(
    place: engines.Place, members: Sequence[exchange.Member]
) -> dict[str, str]:
    """Returns the variables of one of the processes that have connected."""
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
        # As `launch` counts.
        "TF_XSHARD_RESTART": str(place.restart),
    }
