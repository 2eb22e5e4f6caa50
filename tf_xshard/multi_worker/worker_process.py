"""One worker's process, and the signals that are passed on to workers."""

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

# Signals that end a program; the exit code is that of the first one.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SIGNALS = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
_LINES_SHOWN = 60


class Signals:
    """Receives this process's signals for the workers, as a context manager.

    Attributes:
      first: The first signal that ends a program, None if there was none.
      new: Signals that have not been passed on.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.new: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        # Python allows handlers in the main thread only; in another thread
        # signals are left to the caller.
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._receive)
                for number in _SIGNALS
                # Under nohup SIGHUP is ignored, and stays so.
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
    """One process, whose output is printed with its rank in front.

    Attributes:
      rank: The worker's rank.
      last_lines: The last lines of its stderr.
      process: The process.
    """

    def __init__(
        self, rank: int, program: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.rank = rank
        self.last_lines: collections.deque[str] = collections.deque(
            maxlen=_LINES_SHOWN
        )
        self.process = subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            # Its own process group: a signal from the terminal reaches it only
            # through this process, and its children can be killed with it.
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
                    # One call per line keeps lines of workers apart.
                    target.write(f"[{self.rank}] {text}\n")
                    target.flush()
                except (OSError, ValueError):
                    # The reader is gone. Keep emptying the pipe, or the worker
                    # would block.
                    continue

    def send(self, number: int) -> None:
        """Sends a signal to the process and its children."""
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            # It has ended. PermissionError: only zombies are left, or a child
            # runs as another user.
            pass

    def has_ended(self) -> bool:
        """Whether it has ended. If so, kills children that outlive it."""
        if self.process.poll() is None:
            return False
        # Right away, while no other process group can have its id.
        self.send(signal.SIGKILL)
        return True

    def read_to_end(self) -> None:
        """Waits until its output is printed."""
        for thread in self._threads:
            # With a limit: a child may hold the pipe open.
            thread.join(1.0)
