"""Notices that one process was asked to end, and tells all at one step."""

from __future__ import annotations

import os
import signal
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import keras

# The exit code in a shell of a program that SIGTERM ended. `launch
# --max-restarts` restarts after any code except 0.
EXIT_CODE = 128 + signal.SIGTERM
# Slurm, Kubernetes and clouds send SIGTERM; `sbatch --signal` often SIGUSR1.
# Windows has no SIGUSR1.
_SIGNALS = (signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM))
# The processes ask each other this often. Asking takes 8 ms (four processes on
# one host).
_SECONDS_BETWEEN = 0.5


class Preemption:
    """Receives the signals that ask a process to end, while `fit` runs.

    `gather` gives a value to all processes, and returns all values.
    """

    def __init__(
        self, model: keras.Model, gather: Callable[[Any], list]
    ) -> None:
        self._model = model
        self._gather = gather
        self._pid = os.getpid()
        self._is_asked = False
        self._before: dict[signal.Signals, Any] = {}
        self._num_batches = 0
        self._num_between = 1
        self._last = time.monotonic()

    def start(self) -> None:
        """Receives signals until `stop`, instead of TensorFlow."""
        # MultiWorkerMirroredStrategy lets TensorFlow receive SIGTERM, which
        # then does nothing.
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "GroupCheckpoint(on_preemption=True) needs fit in the main"
                " thread, since Python receives signals only there. Call fit in"
                " the main thread. If something else, such as Ray, restarts the"
                " job from its saves, leave on_preemption out."
            )
        self._before = {
            number: signal.signal(number, self._receive) for number in _SIGNALS
        }

    def stop(self) -> None:
        """Restores the handlers that the program had set."""
        for number, handler in self._before.items():
            # Python does not know TensorFlow's handler. SIGTERM ends the
            # process from now on.
            signal.signal(number, handler or signal.SIG_DFL)
        self._before = {}

    def _receive(self, number: int, frame: types.FrameType | None) -> None:
        # Slurm and `launch` may send the signal twice.
        self._is_asked = True
        # Keras tells callbacks nothing if `fit` raises, and a child process has
        # the handlers of its parent.
        if os.getpid() != self._pid or not self._is_fitting(frame):
            self.stop()
            os.kill(os.getpid(), number)

    def _is_fitting(self, frame: types.FrameType | None) -> bool:
        """Returns True if the model's `fit` called the code of a frame."""
        while frame is not None:
            is_fit = frame.f_code.co_name == "fit"
            if is_fit and frame.f_locals.get("self") is self._model:
                return True
            frame = frame.f_back
        return False

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
        # This number is the same in all processes.
        slowest = max(seconds for _, seconds in answers)
        wanted = max(1, int(_SECONDS_BETWEEN / max(slowest, 1e-6)))
        # Batches may take longer again.
        self._num_between = min(wanted, 2 * self._num_between)
        self._num_batches, self._last = 0, time.monotonic()
        return any(is_asked for is_asked, _ in answers)
