"""Uses the key-value store of MultiWorkerMirroredStrategy's processes."""

from __future__ import annotations

import tensorflow as tf

from tf_xshard.private import names

_PYTHON = "tensorflow.python."
_CONTEXT = _PYTHON + "eager.context.Context."
# Present in TensorFlow 2.20 to 2.22.
_STORE = names.PrivateNames(
    "An optimizer under MultiWorkerMirroredStrategy",
    {
        # The key-value store of the coordination service that
        # MultiWorkerMirroredStrategy starts. While workers trace, they exchange
        # there which variables have a gradient. A collective would not do,
        # since its error does not say which worker was missing.
        "context": _PYTHON + "eager.context.context",
        "set": _CONTEXT + "set_config_key_value",
        "get": _CONTEXT + "get_config_key_value",
        "delete": _CONTEXT + "delete_config_key_value",
    },
)


def publish(key: str, value: str) -> None:
    """Puts a value into the cluster's key-value store."""
    _STORE.set(_STORE.context(), key, value)


_LOOKUP_SLICE_SECONDS = 5.0


def lookup(key: str, timeout_seconds: float) -> str:
    """Waits for a value in the cluster's key-value store."""
    # Wait in slices, so that time in which this process is stopped does not
    # count.
    remaining = max(timeout_seconds, 0.001)
    while True:
        seconds = min(remaining, _LOOKUP_SLICE_SECONDS)
        remaining -= seconds
        try:
            return _STORE.get(
                _STORE.context(), key, max(1, int(seconds * 1000))
            )
        except tf.errors.DeadlineExceededError:
            if remaining <= 0:
                raise


def withdraw(key: str) -> None:
    """Removes a value from the cluster's key-value store."""
    _STORE.delete(_STORE.context(), key)
