"""Notices that one process was asked to end, and tells all at one step."""

from __future__ import annotations

import os
import signal
import threading
import time
import types
from collections.abc import Callable
from typing import Any

# What a program that SIGTERM ends returns in a shell. `launch --max-restarts`
# restarts after any code but 0.
EXIT_CODE = 128 + signal.SIGTERM
# Slurm, Kubernetes and clouds send SIGTERM; `sbatch --signal` often SIGUSR1.
# Windows has no SIGUSR1.
_SIGNALS = (signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM))
# The processes ask each other this often, in 8 ms (four processes on a host).
_SECONDS_BETWEEN = 0.5


class Preemption:
    """Receives the signals that ask a process to end, while `fit` runs.

    `gather` gives a value to all processes, and returns all values.
    """

    def __init__(self, gather: Callable[[Any], list]) -> None:
        self._gather = gather
        self._is_asked = False
        self._before: dict[signal.Signals, Any] = {}
        self._num_batches = 0
        self._num_between = 1
        self._last = time.monotonic()

    def start(self) -> None:
        """Receives signals until `stop`, in place of TensorFlow."""
        # MultiWorkerMirroredStrategy lets TensorFlow receive SIGTERM, which
        # then does nothing.
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "GroupCheckpoint(on_preemption=True) needs fit in the main"
                " thread, since Python receives signals only there. Leave it"
                " out where something else, such as Ray, restarts from saves."
            )
        self._before = {
            number: signal.signal(number, self._receive) for number in _SIGNALS
        }

    def stop(self) -> None:
        """Gives signals back to the program."""
        for number, handler in self._before.items():
            # None is a handler that was not set from Python.
            signal.signal(number, handler or signal.SIG_DFL)
        self._before = {}

    def _receive(self, number: int, frame: types.FrameType | None) -> None:
        # Slurm and `launch` may send the signal twice.
        self._is_asked = True
        # Keras tells callbacks nothing if `fit` raises. Then this signal is no
        # longer ours.
        while frame is not None and frame.f_code.co_name != "fit":
            frame = frame.f_back
        if frame is None:
            self.stop()
            os.kill(os.getpid(), number)

    def is_asked(self, *, at_once: bool = False) -> bool:
        """Returns True if any process was asked. Collective.

        Call it after each batch. All processes get the same answer; most calls
        return False without asking the others, unless `at_once`.
        """
        self._num_batches += 1
        if self._num_batches < self._num_between and not at_once:
            return False
        seconds = (time.monotonic() - self._last) / self._num_batches
        answers = self._gather([self._is_asked, seconds])
        # The same number in all processes.
        slowest = max(seconds for _, seconds in answers)
        self._num_between = max(1, int(_SECONDS_BETWEEN / max(slowest, 1e-6)))
        self._num_batches, self._last = 0, time.monotonic()
        return any(is_asked for is_asked, _ in answers)
