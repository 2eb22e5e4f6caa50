"""Counts the collectives, bytes and seconds of this process as they run.

The counters are updated next to each operation, and nothing waits for them. One
operation counts the collective and its bytes. Only functions that are traced in
a `timing` context count seconds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import tensorflow as tf

from tf_xshard.collectives import recorder
from tf_xshard.collectives import runtime_variables


class Totals(NamedTuple):
    """Sums over all collectives of one replica, or of a process's replicas.

    `num_bytes` counts the inputs; for `bytes_sent` see `recorder.bytes_sent`.
    `seconds` is the time from each input to its result. Collectives that run at
    the same time all count.
    """

    collectives: float = 0
    num_bytes: float = 0
    bytes_sent: float = 0
    seconds: float = 0


class Counters:
    """Counts the collectives that run one after another on one device."""

    def __init__(self, host: str, name: str) -> None:
        self._host, self._name = host, name
        # The number of collectives, their bytes, and the bytes sent.
        self._ended = runtime_variables.handle(
            host, f"{name}_ended", tf.int64, [3]
        )

    def begin(self) -> None:
        """Notes the time at which a collective's input is ready."""
        if _is_timing():
            tf.raw_ops.AssignSubVariableOp(
                resource=self._seconds(), value=tf.timestamp()
            )

    def end(self, cost: recorder.Cost) -> None:
        """Counts a collective that has ended."""
        tf.raw_ops.AssignAddVariableOp(
            resource=self._ended,
            value=tf.convert_to_tensor([1, *cost], tf.int64),
        )
        if _is_timing():
            tf.raw_ops.AssignAddVariableOp(
                resource=self._seconds(), value=tf.timestamp()
            )

    def _seconds(self) -> tf.Tensor:
        return runtime_variables.handle(
            self._host, f"{self._name}_seconds", tf.float64
        )

    def num_ended(self) -> int:
        """Returns the number of collectives that have ended."""
        return int(runtime_variables.read(self._ended, tf.int64)[0])

    def totals(self) -> Totals:
        """Returns the totals of the collectives that have ended."""
        seconds = runtime_variables.read(self._seconds(), tf.float64)
        ended, num_bytes, bytes_sent = map(
            int, runtime_variables.read(self._ended, tf.int64)
        )
        return Totals(ended, num_bytes, bytes_sent, float(seconds))


def added(totals: Iterable[Totals]) -> Totals:
    """Sums several `Totals` field by field."""
    columns = list(map(sum, zip(Totals(), *totals, strict=True)))
    return Totals(*columns)


# The totals of collectives that run in Python, in eager mode.
_lock = threading.Lock()
_in_python = Totals()


def count_in_python(cost: recorder.Cost) -> None:
    """Counts a collective that runs in Python, where no collective waits."""
    global _in_python
    with _lock:
        _in_python = added([_in_python, Totals(1, *cost)])


def counted_in_python() -> Totals:
    """Returns the totals of `count_in_python` on all replicas."""
    return _in_python


_num_timing = 0


def _is_timing() -> bool:
    return _num_timing > 0


@contextlib.contextmanager
def timing() -> Iterator[None]:
    """Makes functions that are traced in this context also count seconds."""
    global _num_timing
    with _lock:
        _num_timing += 1
    try:
        yield
    finally:
        with _lock:
            _num_timing -= 1
