"""Starts and stops the processes of a job: `python -m tf_xshard launch`.

Each host starts its own rank, without a shell or ssh.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from typing import Any, IO, TextIO

from tf_xshard.distribute import engines
from tf_xshard.multi_worker import connect
from tf_xshard.multi_worker import exchange
from tf_xshard.multi_worker import local_cluster

# Signals that end a program. The exit code is the first such signal's.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SIGNALS = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
_LINES_SHOWN = 60
# Workers may run on for this long after a signal from outside, to save, or
# after another worker has failed, when they can't communicate anymore.
GRACE_SECONDS = 30.0
GRACE_AFTER_FAILURE_SECONDS = 2.0
_SECONDS_BETWEEN_LOOKS = 0.05
# The output of a process that has ended is in the pipe. If a pipe stays empty
# for this long, a child in another process group holds it open.
_SECONDS_OF_AN_EMPTY_PIPE = 1.0


class Signals:
    """Receives this process's signals for workers, as a context manager."""

    def __init__(self) -> None:
        # The first signal that ends a program.
        self.first: int | None = None
        # The signals that have not been passed on.
        self.new: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        # Python allows signal handlers only in the main thread. In another
        # thread, signals are left to the caller.
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._receive)
                for number in _SIGNALS
                # nohup ignores SIGHUP, which must stay ignored.
                if signal.getsignal(number) != signal.SIG_IGN
            }
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        if number in ENDING:
            self.first = self.first or number
        self.new.append(number)


class Worker:
    """Runs a worker's process, and prints its output with its rank in front."""

    def __init__(
        self, rank: int, program: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.rank = rank
        # The last lines of stderr.
        self.last_lines: collections.deque[str] = collections.deque(
            maxlen=_LINES_SHOWN
        )
        # Why `launch` sent a signal, by the signal's number.
        self.reasons: dict[int, str] = {}
        # When the process was seen to have ended.
        self._ended = 0.0
        self.process = subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            # With a separate process group, a signal from the terminal reaches
            # the worker only through this process, and the worker's children
            # can be killed with it.
            start_new_session=True,
        )
        self._copies = [
            _Copy(f"[{rank}] ", self.process.stdout, sys.stdout),
            _Copy(
                f"[{rank}] ", self.process.stderr, sys.stderr, self.last_lines
            ),
        ]
        for copy in self._copies:
            copy.start()

    def send(self, number: int, reason: str = "") -> None:
        """Sends a signal to the process and its children."""
        if reason:
            self.reasons[number] = reason
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            # The process has ended. PermissionError means that only zombies are
            # left, or that a child runs as another user.
            pass

    def has_ended(self) -> bool:
        """Returns True if the process has ended, after killing its children."""
        if self.process.poll() is None:
            return False
        # Kill now, while no other process group can have the process's id.
        self.send(signal.SIGKILL)
        self._ended = time.monotonic()
        return True

    def is_printed(self) -> bool:
        """Returns True if the output of an ended process is printed."""
        return all(copy.is_printed(self._ended) for copy in self._copies)

    def how_it_ended(self) -> str:
        """Says how a process that has failed has ended, and who ended it."""
        code = self.process.returncode
        if code > 0:
            return f"failed with exit code {code}"
        how = f"was ended by {signal.Signals(-code).name}"
        if reason := self.reasons.get(-code):
            how += f", {reason}"
        return how


class _Copy(threading.Thread):
    """Prints the lines of a pipe, with a prefix, until the pipe is closed."""

    def __init__(
        self,
        prefix: str,
        source: IO[bytes] | None,
        target: TextIO,
        last_lines: collections.deque[str] | None = None,
    ) -> None:
        super().__init__(daemon=True)
        assert source is not None, "the process has a pipe"
        self._prefix = prefix
        # A progress bar ends its lines with "\r", which newline="" keeps.
        self._source = io.TextIOWrapper(
            source, encoding="utf-8", errors="replace", newline=""
        )
        self._target = target
        self._last_lines = last_lines
        # Since when the pipe is empty. None while a line is printed.
        self._since: float | None = time.monotonic()

    def run(self) -> None:
        """Prints lines until the pipe is closed."""
        with self._source:
            for line in self._source:
                self._since = None
                self._print(line)
                self._since = time.monotonic()

    def _print(self, line: str) -> None:
        text = line.rstrip("\r\n")
        end = "\r" if line.endswith("\r") else "\n"
        if self._last_lines is not None and end == "\n":
            self._last_lines.append(text)
        # If the reader is gone, the pipe must still be emptied, or the worker
        # blocks.
        with contextlib.suppress(OSError, ValueError):
            # One call per line keeps the lines of workers apart.
            self._target.write(f"{self._prefix}{text}{end}")
            self._target.flush()

    def is_printed(self, ended: float) -> bool:
        """Returns True if the process, which has ended, left no output."""
        since = self._since
        return not self.is_alive() or (
            since is not None
            and time.monotonic() - max(since, ended) > _SECONDS_OF_AN_EMPTY_PIPE
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--workers",
        type=int,
        help="the number of processes to start on this machine; with"
        " --from-env, the total number of processes, if the engine does not"
        " tell it (Kubernetes)",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--hosts",
        help="host:port of every worker, in the order of ranks, separated by"
        " commas; this machine starts one of them",
    )
    where.add_argument(
        "--from-env",
        action="store_true",
        help="run the script in this process, if srun, mpiexec, torchrun or a"
        " Kubernetes Job has started all processes",
    )
    parser.add_argument(
        "--rank", type=int, help="the index of this machine in --hosts"
    )
    parser.add_argument(
        "--connect-timeout",
        type=float,
        default=connect.TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="with --hosts and --from-env, how long to wait until all workers"
        " are started (default: %(default)g)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        help="how many times to restart all workers after a failure; the script"
        " resumes from its last save (tf_xshard.GroupCheckpoint)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=GRACE_SECONDS,
        metavar="SECONDS",
        help="with --workers and --hosts, how long workers may run on after a"
        " signal that ends them, to save, before they are killed (default:"
        " %(default)g)",
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
    if options.from_env:
        return _run_from_environment(program, options, parser)
    received = Signals()
    for restart in range(options.max_restarts + 1):
        if restart:
            _say(f"restart {restart} of {options.max_restarts}")
        if hosts and not _all_have_started(hosts, options):
            return 1
        # Earlier signals were for workers that have ended.
        received.new.clear()
        with received:
            job = _Job(
                program,
                hosts or local_cluster.local_addresses(options.workers),
                [options.rank] if hosts else range(options.workers),
                restart,
                options.grace,
            )
            code = job.wait(received)
        if received.first is not None:
            return 128 + received.first
        if code == 0:
            break
    return code


def _run_from_environment(
    program: Sequence[str],
    options: argparse.Namespace,
    parser: argparse.ArgumentParser,
) -> int:
    """Becomes the script's process, joined to the engine's processes."""
    added: dict[str, str] = {}
    try:
        place = connect.found_place(options.workers)
        if os.environ.get(engines.ALONE) == "1" or place is None:
            _say("this is the only process of its job, so it trains alone")
        else:
            # MPI, if the script uses it, must not be started here.
            connect.refuse_without_leader(place)
            members = exchange.exchange(place, options.connect_timeout)
            added = connect.environment(place, members)
    except ValueError as error:
        parser.error(str(error))
    except exchange.JobError as error:
        _say(str(error))
        return 1
    # This process keeps its number, its open files and its signals, which the
    # engine knows.
    os.execve(
        sys.executable,
        [sys.executable, *program],
        {**local_cluster.KEEPS_FREED_MEMORY, **os.environ, **added},
    )


def _all_have_started(
    hosts: Sequence[str], options: argparse.Namespace
) -> bool:
    """Waits until every host is ready to start its worker."""
    # Each host gets here only after its old worker has ended. A new worker
    # therefore never connects to an old worker.
    host, _, port = hosts[0].rpartition(":")
    place = engines.Place(
        "launch",
        options.rank,
        len(hosts),
        host.strip("[]"),
        int(port),
        hosts[0],
    )
    try:
        exchange.exchange(place, options.connect_timeout, hosts)
    except exchange.JobError as error:
        _say(str(error))
        return False
    except KeyboardInterrupt:
        _say("interrupted while it waited for the other hosts")
        return False
    return True


def _checked_hosts(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> list[str] | None:
    """Returns the addresses of --hosts, or None without --hosts."""
    if options.max_restarts < 0:
        parser.error(
            f"--max-restarts {options.max_restarts}: must be 0 or more"
        )
    if not 0 < options.connect_timeout < float("inf"):
        parser.error(
            f"--connect-timeout {options.connect_timeout}: must be positive"
        )
    if not 0 <= options.grace < float("inf"):
        parser.error(f"--grace {options.grace}: must be 0 or more")
    if engines.task() is not None:
        parser.error(
            "TF_CONFIG is set already, so something else has started this"
            " process as a worker. Run the script without `launch`, or unset"
            " TF_CONFIG."
        )
    if options.workers is not None and options.workers < 1:
        parser.error(f"--workers {options.workers}: must be at least 1")
    if options.hosts is None:
        if options.rank is not None:
            parser.error("--rank needs --hosts")
        if options.from_env:
            if options.max_restarts:
                parser.error(
                    "--max-restarts can't be combined with --from-env: the"
                    " engine restarts the processes"
                )
        elif options.workers is None:
            parser.error("--workers, --hosts or --from-env is required")
        else:
            _refuse_a_step_of_several(options, parser)
        return None
    if options.workers is not None:
        parser.error("--workers can't be combined with --hosts")
    hosts = options.hosts.split(",")
    for host in hosts:
        if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\s]+):\d{1,5}", host):
            parser.error(f"--hosts: {host!r} is not host:port")
        if not 0 < int(host.rpartition(":")[2]) < 1 << 16:
            parser.error(f"--hosts: {host!r} is not host:port, up to 65535")
    if len(set(hosts)) < len(hosts):
        parser.error(f"--hosts: {options.hosts} has the same address twice")
    loopback = [host for host in hosts if host.startswith("127.")]
    ports = [host.rpartition(":")[2] for host in loopback]
    if len(set(ports)) < len(ports):
        parser.error(
            f"--hosts: {','.join(loopback)} are one machine, on which"
            " TensorFlow listens at all addresses. Give each its own port."
        )
    if options.rank is None or not 0 <= options.rank < len(hosts):
        got = "" if options.rank is None else f", got {options.rank}"
        parser.error(
            f"--hosts needs a --rank of 0 to {len(hosts) - 1}, the index of"
            f" this machine in --hosts{got}"
        )
    return hosts


def _refuse_a_step_of_several(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    """Ends the program if each of several processes would start a job."""
    engine, size = engines.size_of_step()
    if size > 1 and os.environ.get(engines.ALONE) != "1":
        parser.error(
            f"--workers {options.workers} in each of the {size} processes that"
            f" {engine} started would train {size} times. Use --from-env to"
            " train once, with one worker per process. To train separately in"
            f" each process, set {engines.ALONE}=1."
        )


def _say(text: str) -> None:
    print(f"tf_xshard launch: {text}", file=sys.stderr, flush=True)


class _Job:
    """Starts the workers of this machine, and waits for them."""

    def __init__(
        self,
        program: Sequence[str],
        addresses: Sequence[str],
        ranks: Sequence[int],
        restart: int,
        grace_seconds: float,
    ) -> None:
        self._grace_seconds = grace_seconds
        self._workers: list[Worker] = []
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
                self._workers.append(Worker(rank, program, environment))
        except OSError:
            for worker in self._workers:
                worker.send(signal.SIGKILL)
            raise

    def wait(self, received: Signals) -> int:
        """Waits until all workers have ended, and returns the exit code."""
        running = list(self._workers)
        failed: Worker | None = None
        deadline: float | None = None
        reason = ""
        while running:
            while received.new:
                number = received.new.pop(0)
                name = signal.Signals(number).name
                for worker in running:
                    worker.send(number, "which launch received and passed on")
                if number not in ENDING:
                    continue
                if deadline is None:
                    grace = self._grace_seconds
                    deadline = time.monotonic() + grace
                    reason = f"since it still ran {grace:g} s after {name}"
                    _say(
                        f"received {name} and passed it on to workers"
                        f" {_ranks(running)}, which will be killed if they"
                        f" still run in {grace:g} s (--grace)"
                    )
                else:
                    deadline = time.monotonic()
                    reason = f"since launch received {name} meanwhile"
            for worker in list(running):
                if not worker.has_ended():
                    continue
                running.remove(worker)
                if worker.process.returncode and failed is None:
                    failed = worker
                    # After a signal from outside, other workers may be saving.
                    if deadline is None:
                        grace = GRACE_AFTER_FAILURE_SECONDS
                        deadline = time.monotonic() + grace
                        reason = (
                            f"since it still ran {grace:g} s after worker"
                            f" {worker.rank} had failed"
                        )
                        self._end(running, worker)
            if deadline is not None and time.monotonic() > deadline:
                for worker in running:
                    if signal.SIGKILL not in worker.reasons:
                        _say(f"worker {worker.rank} is killed, {reason}")
                    worker.send(signal.SIGKILL, f"sent by launch, {reason}")
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        self._print_to_end(received)
        if failed is None:
            return 0
        return self._report(failed)

    def _end(self, workers: Sequence[Worker], failed: Worker) -> None:
        if workers:
            _say(
                f"worker {failed.rank} {failed.how_it_ended()}, so workers"
                f" {_ranks(workers)} are ended"
            )
        for worker in workers:
            reason = f"sent by launch after worker {failed.rank} had failed"
            worker.send(signal.SIGTERM, reason)
            # A stopped process handles SIGTERM only when it continues.
            worker.send(signal.SIGCONT, reason)

    def _print_to_end(self, received: Signals) -> None:
        """Waits until the reader of this process has taken all output."""
        while not all(worker.is_printed() for worker in self._workers):
            for number in received.new:
                if number in ENDING:
                    # Python's own exit would also wait for the reader.
                    signal.signal(number, signal.SIG_DFL)
                    signal.raise_signal(number)
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _report(self, failed: Worker) -> int:
        how = failed.how_it_ended()
        _say(f"worker {failed.rank} {how}. Its last lines of stderr:")
        for line in failed.last_lines:
            print(f"[{failed.rank}] {line}", file=sys.stderr, flush=True)
        _say(f"worker {failed.rank} {how}.")
        code = failed.process.returncode
        return 128 - code if code < 0 else code


def _ranks(workers: Sequence[Worker]) -> list[int]:
    return [worker.rank for worker in workers]
