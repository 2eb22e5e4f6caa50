"""A timeout for every collective, watched by one thread.

TensorFlow's own `timeout_seconds` starts two threads per collective that sleep
for the whole timeout, also after it has completed: at 300 seconds and 1,000
collectives a second, hundreds of thousands. Here two variables per device and
lane count the collectives that have begun and those that have ended, and one
thread per process looks at them.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

import tensorflow as tf
from absl import logging

from tf_xshard.private import tensorflow as private_tensorflow

_LOOKS_PER_TIMEOUT = 20
_MAX_SECONDS_BETWEEN_LOOKS = 5.0

_lock = threading.Lock()
_lanes = {}
_under_way = []
_thread = None


@dataclasses.dataclass
class _Lane:
    """The collectives of one lane of one device."""

    begun: tf.Tensor
    ended: tf.Tensor
    device: str
    timeout_seconds: float
    num_cancelled: int = 0
    num_ended: int = 0
    waiting_since: float | None = None


@dataclasses.dataclass(eq=False)
class Work:
    """Work of several processes, in which some collective has to end at times.

    What TensorFlow itself waits for has no timeout: whether others have data,
    for example. Only time in which TensorFlow computes counts, not that in
    which it traces.

    Attributes:
      timeout_seconds: Longer than this with no collective that ends, and all
        collectives of this process are aborted.
    """

    timeout_seconds: float
    _state: tuple = ()
    _since: float = 0.0

    def begin(self) -> None:
        """Begins it; once again, and its time starts anew."""
        with _lock:
            self._state = ()
            if self not in _under_way:
                _under_way.append(self)
            _start_thread()

    def end(self) -> None:
        """Ends it; a second time does nothing."""
        with _lock:
            if self in _under_way:
                _under_way.remove(self)

    def is_overdue(self, num_ended: int) -> bool:
        """Whether it stands still.

        Args:
          num_ended: How many collectives of this process have ended.

        Returns:
          A bool.
        """
        now = time.monotonic()
        if self._state != (num_ended,) or (
            not private_tensorflow.a_function_runs()
        ):
            self._state, self._since = (num_ended,), now
        return now - self._since > self.timeout_seconds


def host_variable(device: str, name: str, dtype) -> tf.Tensor:
    """The handle of a new variable, zero, for as long as the process lives."""
    with tf.init_scope(), tf.device(device):
        handle = tf.raw_ops.VarHandleOp(
            dtype=dtype, shape=[], container="", shared_name=name
        )
        tf.raw_ops.AssignVariableOp(
            resource=handle, value=tf.constant(0, dtype)
        )
    return handle


def _lane(device: str, lane: int, timeout_seconds: float) -> _Lane:
    key = device, lane, timeout_seconds
    with _lock:
        if key not in _lanes:
            spec = tf.DeviceSpec.from_string(device)
            host = spec.replace(device_type="CPU", device_index=0).to_string()
            name = "tf_xshard_" + "_".join(map(str, key))
            _lanes[key] = _Lane(
                host_variable(host, f"{name}_begun", tf.int64),
                host_variable(host, f"{name}_ended", tf.int64),
                device,
                timeout_seconds,
            )
        _start_thread()
        return _lanes[key]


def _start_thread() -> None:
    global _thread
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(
            target=_watch, name="tf_xshard_watchdog", daemon=True
        )
        _thread.start()


def run(
    collective: Callable[[], tf.Tensor],
    after: tf.Tensor,
    device: str,
    lane: int,
    timeout_seconds: float,
) -> tf.Tensor:
    """Runs a collective under the watchdog's eye, eagerly or in a graph.

    Args:
      collective: Makes the operation and returns its result.
      after: Its input. Time counts from when that is there.
      device: The device of the replica.
      lane: Collectives of one lane run one after another.
      timeout_seconds: Longer than this, and all collectives of this process are
        aborted with a DeadlineExceededError.

    Returns:
      What `collective` returns.
    """
    watched = _lane(device, lane, timeout_seconds)
    one = tf.constant(1, tf.int64)
    with tf.control_dependencies([after]):
        begin = tf.raw_ops.AssignAddVariableOp(
            resource=watched.begun, value=one
        )
    # In eager mode it has run, and is no operation to depend on.
    with tf.control_dependencies([] if begin is None else [begin]):
        result = collective()
    with tf.control_dependencies([result]):
        tf.raw_ops.AssignAddVariableOp(resource=watched.ended, value=one)
    return result


def _watch() -> None:
    while True:
        with _lock:
            lanes, under_way = list(_lanes.values()), list(_under_way)
        try:
            overdue = [lane for lane in lanes if _is_overdue(lane)]
            num_ended = sum(lane.num_ended for lane in lanes)
            stands_still = [
                work for work in under_way if work.is_overdue(num_ended)
            ]
        except Exception as error:  # Without this thread nothing has a timeout.
            _abort(f"The watchdog of collectives failed: {error}")
            return
        if overdue:
            _abort(
                f"A collective on {overdue[0].device} waited longer than"
                f" {overdue[0].timeout_seconds} seconds for the other replicas"
                " (Communication.timeout_seconds). One of them ended, hangs, or"
                " runs other steps."
            )
            return
        if stands_still:
            _abort(
                "A batch waited longer than"
                f" {stands_still[0].timeout_seconds} seconds for data, or for"
                " the other workers to have some"
                " (Communication.timeout_seconds). One of them hangs."
            )
            return
        shortest = min(
            (one.timeout_seconds for one in [*lanes, *under_way]),
            default=_LOOKS_PER_TIMEOUT * _MAX_SECONDS_BETWEEN_LOOKS,
        )
        time.sleep(
            min(shortest / _LOOKS_PER_TIMEOUT, _MAX_SECONDS_BETWEEN_LOOKS)
        )


def _is_overdue(lane: _Lane) -> bool:
    begun, ended = _counts(lane)
    now = time.monotonic()
    if begun - lane.num_cancelled <= ended:
        lane.waiting_since = None
    elif lane.waiting_since is None or ended != lane.num_ended:
        lane.waiting_since = now
    lane.num_ended = ended
    if (
        lane.waiting_since is None
        or now - lane.waiting_since <= lane.timeout_seconds
    ):
        return False
    # A step that fails on one replica cancels what the others began.
    if private_tensorflow.nothing_computes() and _counts(lane) == (
        begun,
        ended,
    ):
        lane.num_cancelled = begun - ended
        lane.waiting_since = None
        return False
    return True


def _counts(lane: _Lane) -> tuple[int, int]:
    # Read in this order, one that ends meanwhile is no longer under way.
    begun, ended = (
        int(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64))
        for handle in (lane.begun, lane.ended)
    )
    return begun, ended


def _abort(message: str) -> None:
    message += " Restart the program."
    logging.error(message)
    private_tensorflow.abort_collectives(message)
