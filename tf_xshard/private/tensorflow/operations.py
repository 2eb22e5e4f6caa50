"""Sees each operation that is run, or added to a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tf_xshard.private import names

_PYTHON = "tensorflow.python.framework.op_callbacks."
# Present in TensorFlow 2.20 to 2.22. tf.debugging.enable_check_numerics is made
# of them. MirroredStrategy hands them on to its replicas' threads.
_CALLBACKS = names.PrivateNames(
    "python -m tf_xshard compare",
    {
        "add": _PYTHON + "add_op_callback",
        "remove": _PYTHON + "remove_op_callback",
    },
)


@contextlib.contextmanager
def seen(function: Callable[[str], None]) -> Iterator[None]:
    """Calls a function with the type of each operation of this thread."""

    def callback(op_type: str | bytes, *args, **kwargs) -> None:
        function(op_type if isinstance(op_type, str) else op_type.decode())

    _CALLBACKS.add(callback)
    try:
        yield
    finally:
        _CALLBACKS.remove(callback)
