"""Replaces methods of TensorFlow and Keras while a script runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sysconfig
from collections.abc import Callable
from typing import Any
from unittest import mock

import tensorflow as tf

import tf_xshard
from tf_xshard.private import frames

_LIBRARIES = (
    sysconfig.get_path("stdlib") + os.sep,
    os.path.dirname(os.path.realpath(tf_xshard.__file__)) + os.sep,
)
_FOLDER = os.path.dirname(__file__) + os.sep
Patch = contextlib.AbstractContextManager


class End(BaseException):
    """Leaves the script, whose `except Exception` does not catch it."""


class Refused(End):
    """The script can't be compared; the message says why."""


def defining(owner: type, name: str) -> type:
    """Returns the class from which a class has a method."""
    return next(one for one in owner.__mro__ if name in vars(one))


def around(owner: type, name: str, function: Callable[..., Any]) -> Patch:
    """Replaces a method by a function that gets the method first."""
    # A change of a class that inherits the method would hide later ones.
    owner = defining(owner, name)
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(plain, *args, **kwargs)

    # Keras reads the arguments of layers from it.
    vars(method)["__signature__"] = inspect.signature(plain)
    return mock.patch.object(owner, name, method)


def refusing(owner: type, name: str, text: str) -> Patch:
    """Makes a method end the script with a reason."""

    def refuse(plain, *args, **kwargs):
        raise Refused(text)

    return around(owner, name, refuse)


def around_argument(
    owner: type, method: str, argument: str, changed: Callable[[Any], Any]
) -> Patch:
    """Changes one argument of each call of a method, or its default."""
    signature = inspect.signature(getattr(owner, method))

    def call(plain, *args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        bound.arguments[argument] = changed(bound.arguments[argument])
        return plain(*bound.args, **bound.kwargs)

    return around(owner, method, call)


def replaced(owner: Any, name: str, value: Any) -> Patch:
    """Replaces an attribute."""
    return mock.patch.object(owner, name, value)


@functools.cache
def is_scripts(file: str) -> bool:
    """Returns True for code of the script, of its modules or made from it."""
    if "__autograph_generated_file" in file:
        return True
    file = os.path.realpath(file)
    installed = "site-packages" in file or "dist-packages" in file
    return (
        os.path.isfile(file)
        and not installed
        and not file.startswith(_LIBRARIES)
    )


def is_called_by_script() -> bool:
    """Returns True if the script, and no library, calls a replaced method."""
    # Only the frames tell who calls.
    return is_scripts(
        next(
            file
            for frame in frames.callers()
            if frame.f_code.co_name != "__init__"
            and not (file := frame.f_code.co_filename).startswith(_FOLDER)
        )
    )


def in_replica() -> bool:
    """Returns True in code that runs on each replica of a strategy."""
    return (
        tf.distribute.has_strategy()
        and not tf.distribute.in_cross_replica_context()
    )
