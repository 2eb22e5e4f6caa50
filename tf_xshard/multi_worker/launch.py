"""`python -m tf_xshard launch`: the processes of one training job.

Each is a worker of a MultiWorkerMirroredStrategy, which finds the others by the
environment variable TF_CONFIG; TF_XSHARD_RESTART counts how often all were
started again. No shell and no ssh: on many hosts each one starts its own rank.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from tf_xshard.multi_worker import local_cluster

# After a signal from outside, in which workers may save; and after one of them
# has failed, in which the others can do nothing together any more.
GRACE_SECONDS = 30.0
GRACE_AFTER_FAILURE_SECONDS = 2.0
_SECONDS_BETWEEN_LOOKS = 0.05
_LINES_SHOWN = 60
_RESTART_MAX_SECONDS = 60.0
_CONNECT_SECONDS = 1.0
_SECONDS_BETWEEN_CONNECTIONS = 0.5
# The first of those that end it is what the exit code tells.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SIGNALS = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--workers", type=int, help="how many processes, on this machine"
    )
    where.add_argument(
        "--hosts",
        help="host:port of every worker, in the order of ranks, with commas;"
        " this machine starts one of them",
    )
    parser.add_argument("--rank", type=int, help="this machine's, with --hosts")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        help="how often to start all workers again when one has failed; the"
        " script goes on from its last save (tf_xshard.GroupCheckpoint)",
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


def run(options, parser) -> int:
    """Starts the workers, and waits for them.

    Args:
      options: The command's arguments.
      parser: Says what is wrong with them.

    Returns:
      0, or the exit code of the first worker that failed: 128 + the number of
      the signal, if one ended it. After a signal to this process that ends a
      program, 128 + its number, however the workers ended.
    """
    hosts = _checked_hosts(options, parser)
    program = ["-m"] * options.module + [options.script, *options.arguments]
    if not options.module and not os.path.isfile(options.script):
        parser.error(f"{options.script!r} is no file")
    received = _Signals()
    with received:
        for restart in range(options.max_restarts + 1):
            if restart:
                _say(f"restart {restart} of {options.max_restarts}")
                _wait_for_ended(hosts or (), options.rank, received)
                if received.first is not None:
                    break
                # What came meanwhile was for workers that have ended.
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


def _checked_hosts(options, parser) -> list[str] | None:
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
        parser.error(f"--hosts: {options.hosts} has one address twice")
    if options.rank is None or not 0 <= options.rank < len(hosts):
        parser.error(
            f"--rank {options.rank}: must be 0 to {len(hosts) - 1}, the number"
            " of this machine in --hosts"
        )
    return hosts


def _say(text: str) -> None:
    print(f"tf_xshard launch: {text}", file=sys.stderr, flush=True)


def _wait_for_ended(hosts: Sequence[str], rank: int | None, received) -> None:
    """Waits until the other hosts' workers have noticed, and ended, too.

    New ones must not meet those. Each is seen closed once: its new one starts
    when this is through there, and listens some seconds later. But a host that
    was cut off looked closed to the others: when it is back they may listen
    again already, and wait for it. Hence the limit; to meet an old worker costs
    both one more restart.
    """
    listening = [host for r, host in enumerate(hosts) if r != rank]
    deadline = time.monotonic() + _RESTART_MAX_SECONDS
    while listening and received.first is None:
        listening = [host for host in listening if _listens(host)]
        if listening and time.monotonic() > deadline:
            _say(f"{', '.join(listening)} still listen: starting all the same")
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


class _Signals:
    """Takes signals for the workers while it is entered."""

    def __init__(self):
        self.first = None
        self.new = []
        self._before = {}

    def __enter__(self):
        # Handlers belong to the main thread; elsewhere signals are not ours.
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._take)
                for number in _SIGNALS
                # nohup ignores SIGHUP, and so do we then.
                if signal.getsignal(number) != signal.SIG_IGN
            }

    def __exit__(self, *exception):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number, frame):
        del frame
        if number in _ENDING:
            self.first = self.first or number
        self.new.append(number)


class _Worker:
    """One process; its output comes through with its rank in front."""

    def __init__(self, rank: int, program: Sequence[str], environment: dict):
        self.rank = rank
        self.last_lines = collections.deque(maxlen=_LINES_SHOWN)
        self.process = subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            # A group of its own: a signal from the terminal reaches it through
            # this process only, and its children end with it.
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=self._pass_on, args=pair, daemon=True)
            for pair in (
                (self.process.stdout, sys.stdout),
                (self.process.stderr, sys.stderr),
            )
        ]
        for thread in self._threads:
            thread.start()

    def _pass_on(self, source, target) -> None:
        with source:
            for line in source:
                text = line.decode(errors="replace").rstrip("\r\n")
                if target is sys.stderr:
                    self.last_lines.append(text)
                try:
                    # One call a line, so that workers' lines do not mix.
                    target.write(f"[{self.rank}] {text}\n")
                    target.flush()
                except (OSError, ValueError):
                    # Nobody reads any more; the worker must not wait for that.
                    continue

    def send(self, number: int) -> None:
        """Sends a signal to the process and its children."""
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            # It has ended; PermissionError where only zombies are left, or a
            # child has become another user.
            pass

    def has_ended(self) -> bool:
        """Whether it has; its children, which outlive it, end then."""
        if self.process.poll() is None:
            return False
        # At once, while no other group can have its number.
        self.send(signal.SIGKILL)
        return True

    def read_to_end(self) -> None:
        """Waits for what it has printed; a child may hold the pipe open."""
        for thread in self._threads:
            thread.join(1.0)


class _Job:
    """The workers that this machine starts, once."""

    def __init__(self, program, addresses, ranks, restart):
        self._workers = []
        try:
            for rank in ranks:
                environment = {
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    "TF_CONFIG": local_cluster.tf_config(addresses, rank),
                    "TF_XSHARD_RESTART": str(restart),
                }
                self._workers.append(_Worker(rank, program, environment))
        except OSError:
            for worker in self._workers:
                worker.send(signal.SIGKILL)
            raise

    def wait(self, received: _Signals) -> int:
        """Waits until all have ended; ends the others when one fails."""
        running, failed, deadline = list(self._workers), None, None
        while running:
            while received.new:
                number = received.new.pop(0)
                for worker in running:
                    worker.send(number)
                if number in _ENDING:
                    # A second one ends all at once.
                    grace = GRACE_SECONDS if deadline is None else 0.0
                    deadline = time.monotonic() + grace
            for worker in list(running):
                if not worker.has_ended():
                    continue
                running.remove(worker)
                if worker.process.returncode and failed is None:
                    failed = worker
                    # After a signal from outside the others may be saving.
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

    def _end(self, workers) -> None:
        for worker in workers:
            worker.send(signal.SIGTERM)
            # One that is stopped takes the signal when it goes on.
            worker.send(signal.SIGCONT)

    def _report(self, failed: _Worker) -> int:
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
