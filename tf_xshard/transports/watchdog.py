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

from tf_xshard import replica_context

_LOOKS_PER_TIMEOUT = 20
_MAX_SECONDS_BETWEEN_LOOKS = 5.0

_lock = threading.Lock()
_lanes = {}
_thread = None


@dataclasses.dataclass
class _Lane:
    """The collectives of one lane of one device."""

    begun: tf.Tensor
    ended: tf.Tensor
    device: str
    timeout_seconds: float
    num_ended: int = 0
    waiting_since: float | None = None


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
    global _thread
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
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(
                target=_watch, name="tf_xshard_watchdog", daemon=True
            )
            _thread.start()
        return _lanes[key]


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
            lanes = list(_lanes.values())
        try:
            overdue = [lane for lane in lanes if _is_overdue(lane)]
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
        shortest = min(lane.timeout_seconds for lane in lanes)
        time.sleep(
            min(shortest / _LOOKS_PER_TIMEOUT, _MAX_SECONDS_BETWEEN_LOOKS)
        )


def _is_overdue(lane: _Lane) -> bool:
    # Read in this order, one that ends meanwhile is no longer under way.
    begun, ended = (
        int(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64))
        for handle in (lane.begun, lane.ended)
    )
    now = time.monotonic()
    if begun <= ended:
        lane.waiting_since = None
    elif lane.waiting_since is None or ended != lane.num_ended:
        lane.waiting_since = now
    lane.num_ended = ended
    return (
        lane.waiting_since is not None
        and now - lane.waiting_since > lane.timeout_seconds
    )


def _abort(message: str) -> None:
    message += " Restart the program."
    logging.error(message)
    replica_context.abort_collectives(message)
