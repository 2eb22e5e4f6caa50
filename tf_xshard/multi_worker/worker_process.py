"""Runs one worker's process, and receives the signals for workers."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any, IO, TextIO

# Signals that end a program. The exit code is the first such signal's.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SIGNALS = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
_LINES_SHOWN = 60


class Signals:
    """A context manager that receives this process's signals for workers."""

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
    """A worker's process, whose output is printed with its rank in front."""

    def __init__(
        self, rank: int, program: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.rank = rank
        # The last lines of stderr.
        self.last_lines: collections.deque[str] = collections.deque(
            maxlen=_LINES_SHOWN
        )
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
        self._threads = [
            threading.Thread(target=self._copy, args=pair, daemon=True)
            for pair in (
                (self.process.stdout, sys.stdout),
                (self.process.stderr, sys.stderr),
            )
        ]
        for thread in self._threads:
            thread.start()

    def _copy(self, source: IO[bytes], target: TextIO) -> None:
        """Prints the lines of a pipe until it is closed."""
        with source:
            for line in source:
                text = line.decode(errors="replace").rstrip("\r\n")
                if target is sys.stderr:
                    self.last_lines.append(text)
                try:
                    # One call per line keeps the lines of workers apart.
                    target.write(f"[{self.rank}] {text}\n")
                    target.flush()
                except (OSError, ValueError):
                    # The reader is gone. Empty the pipe, or the worker blocks.
                    continue

    def send(self, number: int) -> None:
        """Sends a signal to the process and its children."""
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
        # Do so now, while no other process group can have the process's id.
        self.send(signal.SIGKILL)
        return True

    def read_to_end(self) -> None:
        """Waits until the worker's output is printed."""
        for thread in self._threads:
            # The wait has a limit, since a child may hold the pipe open.
            thread.join(1.0)
