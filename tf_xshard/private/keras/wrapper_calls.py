"""Tells whether a tf_xshard optimizer is calling the optimizers inside it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_is_inside: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "tf_xshard_wrapper_calls", default=False
)


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """Marks code in which a wrapper calls the optimizers that it made local."""
    token = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(token)


def is_inside() -> bool:
    """Returns True if a wrapper is among the callers of this function."""
    return _is_inside.get()
