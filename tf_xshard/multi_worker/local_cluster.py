"""A cluster of processes on this machine, over the loopback interface."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence


def free_ports(count: int) -> list[int]:
    """Ports that are free on the loopback interface."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def local_addresses(count: int) -> list[str]:
    """Addresses for so many workers on this machine."""
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def tf_config(addresses: Sequence[str], rank: int) -> str:
    """What TF_CONFIG is for one worker of a cluster."""
    return json.dumps(
        {
            "cluster": {"worker": list(addresses)},
            "task": {"type": "worker", "index": rank},
        }
    )


def start(
    arguments: Sequence[str],
    outputs: Sequence[tuple],
    environment: Mapping[str, str] | None = None,
    **kwargs,
) -> list[subprocess.Popen]:
    """Starts one Python process per worker, each with its TF_CONFIG.

    Args:
      arguments: What follows `python`.
      outputs: For each worker, where its stdout and stderr go, as `Popen` takes
        them. Their number is the number of workers.
      environment: Variables to set besides TF_CONFIG.
      **kwargs: More for `Popen`.

    Returns:
      The processes, in the order of ranks.
    """
    addresses = local_addresses(len(outputs))
    processes = []
    try:
        for rank, (stdout, stderr) in enumerate(outputs):
            processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    stdout=stdout,
                    stderr=stderr,
                    env={
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
