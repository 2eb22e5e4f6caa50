"""Finds what TensorFlow's runtime executes, and aborts its collectives."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator

import tensorflow as tf

from tf_xshard.private import names

_PYTHON = "tensorflow.python."
_CONTEXT = _PYTHON + "eager.context.Context."
# Present in TensorFlow 2.20 to 2.22.
_TIMEOUT = names.PrivateNames(
    "The timeout of collectives",
    {
        "context": _PYTHON + "eager.context.context",
        # Ends collectives that wait for missing peers.
        "abort": _CONTEXT + "abort_collective_ops",
        # A thread is in this module while TensorFlow runs a function for it.
        # This tells a waiting batch from a batch that is being traced.
        "execute": _PYTHON + "eager.execute",
        "quick_execute": _PYTHON + "eager.execute.quick_execute",
    },
)
# The argument of `quick_execute` with a function's inputs and captures.
_INPUTS = "inputs"


def context() -> object:
    """Returns TensorFlow's runtime context, another object after a reset."""
    return _TIMEOUT.context()


def abort_collectives(message: str) -> None:
    """Makes every current and future collective of this process fail."""
    _TIMEOUT.abort(_TIMEOUT.context(), tf.errors.DEADLINE_EXCEEDED, message)


def _executing() -> Iterator[types.FrameType]:
    """Yields the frames in which other threads wait for TensorFlow to run."""
    for thread, frame in sys._current_frames().items():
        if (
            thread != threading.get_ident()
            and frame.f_code.co_filename == _TIMEOUT.execute.__file__
        ):
            yield frame


def a_function_runs() -> bool:
    """Returns True if another thread executes, not just traces, a function."""
    return any(True for _ in _executing())


def a_function_uses(handle: tf.Tensor) -> bool:
    """Returns True if another thread runs a function that captured a handle."""
    # With asynchronous execution, no thread waits for a function, so assume
    # that the function runs.
    return not tf.config.experimental.get_synchronous_execution() or any(
        any(one is handle for one in frame.f_locals.get(_INPUTS, ()))
        for frame in _executing()
    )
