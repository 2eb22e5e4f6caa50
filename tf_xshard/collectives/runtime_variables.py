"""Creates and reads the variables that collectives need.

A named variable is created on first use, and lives until the process ends or
TensorFlow's runtime context is reset. (Tests of TensorFlow and Keras reset it.)
After a reset, it is created again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_xshard.private.tensorflow import runtime

_lock = threading.Lock()
_handles: dict[tuple[str, str], tf.Tensor] = {}
_context: Any = None


def handle(
    device: str, name: str, dtype: tf.DType, shape: Sequence[int] = ()
) -> tf.Tensor:
    """Returns the handle of a variable, which is created with zeros."""
    global _context
    with _lock:
        if _context is not runtime.context():
            _handles.clear()
            _context = runtime.context()
        if (device, name) not in _handles:
            _handles[device, name] = _created(device, name, dtype, shape)
        return _handles[device, name]


def unnamed(device: str, dtype: tf.DType) -> tf.Tensor:
    """Creates a scalar variable, zero, which lives as long as its handle."""
    return _created(device, runtime.anonymous_name(), dtype, ())


def read(handle: tf.Tensor, dtype: tf.DType) -> np.ndarray:
    """Returns the current value of a variable, outside of graphs."""
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype).numpy()


def _created(
    device: str, name: str, dtype: tf.DType, shape: Sequence[int]
) -> tf.Tensor:
    with tf.init_scope(), tf.device(device):
        created = tf.raw_ops.VarHandleOp(
            dtype=dtype, shape=shape, container="", shared_name=name
        )
        tf.raw_ops.AssignVariableOp(
            resource=created,
            # tf.zeros starts the kernel of Fill, which takes longer.
            value=tf.constant(np.zeros(shape, dtype.as_numpy_dtype)),
        )
    return created
