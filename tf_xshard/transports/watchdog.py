"""A timeout for every collective, watched by one thread.

TensorFlow's own `timeout_seconds` starts two threads per collective that sleep
for the whole timeout, also after it has completed: at 300 seconds and 1,000
collectives a second, hundreds of thousands. Here a variable per device and lane
is counted up before and after each collective, odd while one is under way, and
one thread per process looks at them.
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
_watched = {}


@dataclasses.dataclass
class _Progress:
    """What is known of one lane of one device."""

    handle: tf.Tensor
    device: str
    timeout_seconds: float
    count: int = 0
    unchanged_since: float = 0.0


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


def _handle(device: str, lane: int, timeout_seconds: float) -> tf.Tensor:
    key = device, lane, timeout_seconds
    with _lock:
        if not _watched:
            threading.Thread(
                target=_watch, name="tf_xshard_watchdog", daemon=True
            ).start()
        if key not in _watched:
            spec = tf.DeviceSpec.from_string(device)
            host = spec.replace(device_type="CPU", device_index=0).to_string()
            handle = host_variable(
                host, "tf_xshard_progress_" + "_".join(map(str, key)), tf.int64
            )
            _watched[key] = _Progress(handle, device, timeout_seconds)
        return _watched[key].handle


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
    handle = _handle(device, lane, timeout_seconds)
    one = tf.constant(1, tf.int64)
    with tf.control_dependencies([after]):
        begin = tf.raw_ops.AssignAddVariableOp(resource=handle, value=one)
    with tf.control_dependencies([begin] if begin is not None else []):
        result = collective()
    with tf.control_dependencies([result]):
        tf.raw_ops.AssignAddVariableOp(resource=handle, value=one)
    return result


def _watch() -> None:
    while True:
        now = time.monotonic()
        with _lock:
            lanes = list(_watched.values())
        for progress in lanes:
            count = int(
                tf.raw_ops.ReadVariableOp(
                    resource=progress.handle, dtype=tf.int64
                )
            )
            if count != progress.count or count % 2 == 0:
                progress.count, progress.unchanged_since = count, now
            elif now - progress.unchanged_since > progress.timeout_seconds:
                message = (
                    f"A collective on {progress.device} waited longer than"
                    f" {progress.timeout_seconds} seconds for the other"
                    " replicas (Communication.timeout_seconds). One of them"
                    " ended, hangs, or runs other steps. Restart the program."
                )
                logging.error(message)
                replica_context.abort_collectives(message)
                return
        shortest = min(
            (progress.timeout_seconds for progress in lanes), default=1.0
        )
        time.sleep(
            min(shortest / _LOOKS_PER_TIMEOUT, _MAX_SECONDS_BETWEEN_LOOKS)
        )
