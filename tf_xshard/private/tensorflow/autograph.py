"""Keeps AutoGraph away from this package's code, but not from users' code."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable

import tensorflow as tf

from tf_xshard.private import names

_PYTHON = "tensorflow.python."
# Present in TensorFlow 2.20 to 2.22.
_AUTOGRAPH = names.PrivateNames(
    "An optimizer in a tf.function",
    {
        # Marks a function that AutoGraph calls unconverted. do_not_convert also
        # does so, but hides whether the caller is converted, which decides if
        # hooks are converted.
        "artifact": _PYTHON + "autograph.impl.api.autograph_artifact",
    },
)


# Files of TensorFlow that call functions on behalf of converted code.
_CONVERTING = tuple(
    os.path.join(os.path.dirname(tf.__file__), "python", *path)
    for path in (("autograph", "impl", "api.py"), ("distribute", ""))
)
_caller = threading.local()


def entry_point(function: Callable) -> Callable:
    """Makes AutoGraph skip a function that a user's `tf.function` calls.

    Otherwise, AutoGraph would convert all code of this package that a step
    calls, which adds seconds to the first trace and changes nothing. See
    `as_called_by_user` for the functions that users pass.
    """
    unconverted = tf.autograph.experimental.do_not_convert(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        # This package calls an entry point that is inside another entry point.
        if getattr(_caller, "convert", None) is not None:
            return unconverted(*args, **kwargs)
        if not tf.executing_eagerly():
            _AUTOGRAPH.check()
        _caller.convert = _as_it_is
        # Converted code calls functions through AutoGraph's module, and
        # strategy.run(optimizer.apply) calls them from tf.distribute's. The
        # caller's file tells both. AutoGraph's context does not help, since it
        # is always UNSPECIFIED in a replica's thread.
        if sys._getframe(1).f_code.co_filename.startswith(_CONVERTING) and (
            not tf.executing_eagerly()
        ):
            _caller.convert = functools.partial(
                tf.__internal__.autograph.tf_convert,
                ctx=tf.__internal__.autograph.control_status_ctx(),
            )
        try:
            return unconverted(*args, **kwargs)
        finally:
            _caller.convert = None

    # If the name has moved, the first call in a graph fails, not the import.
    return call if _AUTOGRAPH.missing() else _AUTOGRAPH.artifact(call)


def as_called_by_user(function: Callable) -> Callable:
    """Converts a user's function if AutoGraph converts the user's own calls."""
    convert = getattr(_caller, "convert", None)
    return convert(function) if convert else function


def _as_it_is(function: Callable) -> Callable:
    return function
