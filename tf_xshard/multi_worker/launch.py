"""Starts the processes of a training job, for `python -m tf_xshard launch`.

Each host starts its own rank, without a shell or ssh.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence

from tf_xshard.multi_worker import local_cluster
from tf_xshard.multi_worker import worker_process

# Workers may run on after a signal from outside, to save, and after another
# worker has failed, when they can no longer communicate.
GRACE_SECONDS = 30.0
GRACE_AFTER_FAILURE_SECONDS = 2.0
_SECONDS_BETWEEN_LOOKS = 0.05
_RESTART_MAX_SECONDS = 60.0
_CONNECT_SECONDS = 1.0
_SECONDS_BETWEEN_CONNECTIONS = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--workers", type=int, help="how many processes, on this machine"
    )
    where.add_argument(
        "--hosts",
        help="host:port of every worker, in the order of ranks, separated by"
        " commas; this machine starts one of them",
    )
    parser.add_argument("--rank", type=int, help="this machine's, with --hosts")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        help="how often to restart all workers after one has failed; the script"
        " resumes from its last save (tf_xshard.GroupCheckpoint)",
    )
    parser.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="the script is the name of a module",
    )
    parser.add_argument("script", help="a Python program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Starts the workers and waits for them."""
    hosts = _checked_hosts(options, parser)
    program = ["-m"] * options.module + [options.script, *options.arguments]
    if not options.module and not os.path.isfile(options.script):
        parser.error(
            f"{options.script!r} is not a file; for a module, put -m before it"
        )
    received = worker_process.Signals()
    with received:
        for restart in range(options.max_restarts + 1):
            if restart:
                _say(f"restart {restart} of {options.max_restarts}")
                _wait_for_ended(hosts or (), options.rank, received)
                if received.first is not None:
                    break
                # Signals received meanwhile were for workers that have ended.
                received.new.clear()
            job = _Job(
                program,
                hosts or local_cluster.local_addresses(options.workers),
                [options.rank] if hosts else range(options.workers),
                restart,
            )
            code = job.wait(received)
            if code == 0 or received.first is not None:
                break
    if received.first is not None:
        return 128 + received.first
    return code


def _checked_hosts(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> list[str] | None:
    """Returns the addresses of --hosts, or None with --workers."""
    if options.max_restarts < 0:
        parser.error(
            f"--max-restarts {options.max_restarts}: must be 0 or more"
        )
    if options.hosts is None:
        if options.rank is not None:
            parser.error("--rank is for --hosts")
        if options.workers < 1:
            parser.error(f"--workers {options.workers}: must be at least 1")
        return None
    hosts = options.hosts.split(",")
    for host in hosts:
        if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\s]+):\d{1,5}", host):
            parser.error(f"--hosts: {host!r} is not host:port")
    if len(set(hosts)) < len(hosts):
        parser.error(f"--hosts: {options.hosts} has the same address twice")
    if options.rank is None or not 0 <= options.rank < len(hosts):
        got = "" if options.rank is None else f", got {options.rank}"
        parser.error(
            f"--hosts needs a --rank of 0 to {len(hosts) - 1}, the index of"
            f" this machine in --hosts{got}"
        )
    return hosts


def _say(text: str) -> None:
    print(f"tf_xshard launch: {text}", file=sys.stderr, flush=True)


def _wait_for_ended(
    hosts: Sequence[str], rank: int | None, received: worker_process.Signals
) -> None:
    """Waits until the other hosts' workers have ended."""
    # New workers must not connect to old workers. It is enough to see each
    # address closed once, since its host starts a new worker only after its own
    # wait, and the new worker listens some seconds later. The wait has a time
    # limit, since a host that was cut off from the network looked closed to the
    # other hosts. When it is back, their new workers may already listen and
    # wait for it. Connecting to an old worker costs both hosts one more
    # restart.
    listening = [host for r, host in enumerate(hosts) if r != rank]
    deadline = time.monotonic() + _RESTART_MAX_SECONDS
    while listening and received.first is None:
        listening = [host for host in listening if _listens(host)]
        if listening and time.monotonic() > deadline:
            _say(f"{', '.join(listening)} still listening: starting anyway")
            return
        time.sleep(_SECONDS_BETWEEN_CONNECTIONS)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection(
            (host.strip("[]"), int(port)), _CONNECT_SECONDS
        ).close()
    except OSError:
        return False
    return True


class _Job:
    """The workers that this machine starts and waits for."""

    def __init__(
        self,
        program: Sequence[str],
        addresses: Sequence[str],
        ranks: Sequence[int],
        restart: int,
    ) -> None:
        self._workers: list[worker_process.Worker] = []
        settings = local_cluster.settings(len(ranks))
        try:
            for rank in ranks:
                # A worker's MultiWorkerMirroredStrategy finds the other workers
                # in TF_CONFIG. TF_XSHARD_RESTART counts the restarts so far.
                environment = {
                    **settings,
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    "TF_CONFIG": local_cluster.tf_config(addresses, rank),
                    "TF_XSHARD_RESTART": str(restart),
                }
                self._workers.append(
                    worker_process.Worker(rank, program, environment)
                )
        except OSError:
            for worker in self._workers:
                worker.send(signal.SIGKILL)
            raise

    def wait(self, received: worker_process.Signals) -> int:
        """Waits until all workers have ended, and returns the exit code."""
        running = list(self._workers)
        failed: worker_process.Worker | None = None
        deadline: float | None = None
        while running:
            while received.new:
                number = received.new.pop(0)
                for worker in running:
                    worker.send(number)
                if number in worker_process.ENDING:
                    # A second signal kills all workers at once.
                    grace = GRACE_SECONDS if deadline is None else 0.0
                    deadline = time.monotonic() + grace
            for worker in list(running):
                if not worker.has_ended():
                    continue
                running.remove(worker)
                if worker.process.returncode and failed is None:
                    failed = worker
                    # After a signal from outside, other workers may be saving.
                    if deadline is None:
                        self._end(running)
                        deadline = (
                            time.monotonic() + GRACE_AFTER_FAILURE_SECONDS
                        )
            if deadline is not None and time.monotonic() > deadline:
                for worker in running:
                    worker.send(signal.SIGKILL)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        for worker in self._workers:
            worker.read_to_end()
        if failed is None:
            return 0
        return self._report(failed)

    def _end(self, workers: Sequence[worker_process.Worker]) -> None:
        for worker in workers:
            worker.send(signal.SIGTERM)
            # A stopped process handles SIGTERM only when it continues.
            worker.send(signal.SIGCONT)

    def _report(self, failed: worker_process.Worker) -> int:
        code = failed.process.returncode
        how = (
            f"was ended by {signal.Signals(-code).name}"
            if code < 0
            else f"failed with exit code {code}"
        )
        _say(f"worker {failed.rank} {how}. Its last lines of stderr:")
        for line in failed.last_lines:
            print(f"[{failed.rank}] {line}", file=sys.stderr, flush=True)
        _say(f"worker {failed.rank} {how}.")
        return 128 - code if code < 0 else code
