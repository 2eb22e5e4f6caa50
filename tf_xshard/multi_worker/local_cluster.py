"""Starts a cluster of processes on this machine's loopback interface."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, IO

# glibc returns the memory of a large freed buffer to the kernel, which clears
# it page by page when it is needed again, for each message of a step. With
# these settings glibc keeps the memory, and 208 MB took 16% less time
# (benchmarks/README.md). 32 MiB is the largest threshold that glibc accepts.
KEEPS_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
}

# The arguments of glibc's mallopt, which takes an int.
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}
_MAX_INT = 2**31 - 1

# The types of stdout and stderr that subprocess.Popen accepts.
_Output = IO[Any] | int | None


def settings(num_workers: int) -> dict[str, str]:
    """Returns environment variables for workers that share this machine."""
    return {**KEEPS_FREED_MEMORY, **threads(num_workers)}


def keep_freed_memory() -> None:
    """Applies KEEPS_FREED_MEMORY again, if the environment has it."""
    # glibc reads them when a process starts. TensorFlow resets
    # M_MMAP_THRESHOLD to 128 KiB in each process that iterates over a
    # distributed dataset (`ApplyPython311MemoryPatch`).
    mallopt = _mallopt()
    if mallopt is None:
        return
    for name, option in _MALLOPT.items():
        if os.environ.get(name, "").isdecimal():
            mallopt(option, min(int(os.environ[name]), _MAX_INT))


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    # Not every C library on Linux is glibc.
    return getattr(ctypes.CDLL(None), "mallopt", None)


def threads(num_workers: int) -> dict[str, str]:
    """Returns the variables that give a worker its share of the cores."""
    # With a thread for every core in every worker, summing 208 MB in 8-bit
    # integers took 20% longer on two cores.
    if num_workers == 1:
        return {}
    share = max(1, len(cores()) // num_workers)
    return {"TF_NUM_INTRAOP_THREADS": str(share)}


def cores() -> set[int]:
    """Returns the numbers of the cores that this process may use."""
    # macOS and Windows do not say which cores a process may use.
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def free_ports(count: int) -> list[int]:
    """Finds ports that are free on the loopback interface."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def local_addresses(count: int) -> list[str]:
    """Finds addresses for workers on this machine."""
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def tf_config(addresses: Sequence[str], rank: int) -> str:
    """Returns the value of TF_CONFIG for one worker of a cluster."""
    return json.dumps(
        {
            "cluster": {"worker": list(addresses)},
            "task": {"type": "worker", "index": rank},
        }
    )


def start(
    arguments: Sequence[str],
    outputs: Sequence[tuple[_Output, _Output]],
    environment: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[subprocess.Popen[Any]]:
    """Starts one Python process per worker, each with its TF_CONFIG."""
    addresses = local_addresses(len(outputs))
    if defaults is None:
        defaults = settings(len(outputs))
    processes = []
    try:
        for rank, (stdout, stderr) in enumerate(outputs):
            processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    stdout=stdout,
                    stderr=stderr,
                    env={
                        **defaults,
                        **os.environ,
                        **(environment or {}),
                        "TF_CONFIG": tf_config(addresses, rank),
                    },
                    **kwargs,
                )
            )
    except OSError:
        for process in processes:
            process.kill()
        raise
    return processes
