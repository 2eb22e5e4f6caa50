"""Records what a step communicates, while the step is traced.

Every transport records a collective where it creates the operation. The record
therefore shows the operations that will run, without a copy of the rules that
choose them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operation of one replica.

    Attributes:
      operation: `"all-reduce"`, `"reduce-scatter"` or `"all-gather"`.
      purpose: Its purpose, such as `"gradients"`.
      path: The name of the transport.
      groups: The groups of replicas that take part together.
      dtype: The name of the dtype that is sent.
      num_variables: The number of variables whose values it has.
      num_bytes: The size of the replica's input, in bytes; None if the number
        of rows is only known when the operation runs.
      bytes_per_row: The size of one row (the first dimension), in bytes.
      every: The operation runs in one of this many steps.
    """

    operation: str
    purpose: str
    path: str
    groups: group_assignment_lib.GroupAssignment
    dtype: str
    num_variables: int
    num_bytes: int | None
    bytes_per_row: int
    every: int


def bytes_sent(operation: str, num_bytes: Any, group_size: int) -> Any:
    """Returns the bytes that a replica sends in a ring collective."""
    others = group_size - 1
    if operation == ALL_GATHER:
        return num_bytes * others
    # An all-reduce is a reduce-scatter, then an all-gather of its result.
    passes = 2 if operation == ALL_REDUCE else 1
    return passes * num_bytes * others / group_size


class Cost(NamedTuple):
    """The bytes of one operation on a replica, ints or scalar int64 tensors."""

    num_bytes: Any
    bytes_sent: Any


def cost(operation: str, num_bytes: Any, group_size: int) -> Cost:
    """Returns the `Cost` of an operation."""
    sent = bytes_sent(operation, num_bytes, group_size)
    return Cost(num_bytes, int(sent) if isinstance(sent, float) else sent)


Found = list[tuple[Collective, int | None]]


class _Recorder(threading.local):
    """This thread's recording; the steps of other threads run as usual."""

    found: Found | None = None


_recorder = _Recorder()


class _Labels(threading.local):
    """The labels of collectives that this thread (a replica) creates."""

    purpose = "gradients"
    every = 1
    counts: Sequence[int] = ()
    dtype: str | None = None


_labels = _Labels()


@contextlib.contextmanager
def labelled(
    purpose: str | None = None,
    every: int = 1,
    counts: Sequence[int] | None = None,
    dtype: str | None = None,
) -> Iterator[None]:
    """Labels the collectives that are created in this context."""
    before = vars(_labels).copy()
    _labels.purpose = purpose or _labels.purpose
    _labels.every = _labels.every * every
    _labels.counts = _labels.counts if counts is None else counts
    _labels.dtype = dtype or _labels.dtype
    try:
        yield
    finally:
        vars(_labels).clear()
        vars(_labels).update(before)


def note(
    operation: str,
    path: str,
    groups: group_assignment_lib.GroupAssignment,
    replica_id: int | None,
    tensor: tf.Tensor,
    position: int,
) -> None:
    """Records a collective that is being created."""
    if _recorder.found is None:
        return
    counts = _labels.counts
    collective = Collective(
        operation,
        _labels.purpose,
        path,
        groups,
        _labels.dtype or tensor.dtype.name,
        counts[position] if position < len(counts) else 0,
        _num_bytes(tensor, tensor.shape),
        _num_bytes(tensor, tensor.shape[1:]) or 0,
        _labels.every,
    )
    _recorder.found.append((collective, replica_id))


def _num_bytes(tensor: tf.Tensor, shape: tf.TensorShape) -> int | None:
    if not shape.is_fully_defined():
        return None
    return tensor.dtype.size * shape.num_elements()


def is_recording() -> bool:
    """Returns True if this thread only traces, to record collectives."""
    return _recorder.found is not None


@contextlib.contextmanager
def recorded(found: Found | None = None) -> Iterator[Found]:
    """Records the collectives that this thread creates.

    Meanwhile, processes don't exchange which gradients they have. Other
    processes are assumed to have the same gradients as this process. A step
    that is traced in this context must not run.
    """
    before = _recorder.found
    _recorder.found = found if found is not None else []
    try:
        yield _recorder.found
    finally:
        _recorder.found = before
