"""Checks arguments, and returns the converted value or raises an error."""

from __future__ import annotations

import math
import operator
from typing import Any


def integer(name: str, value: Any) -> int:
    """Converts an integer of any type except bool to int."""
    # operator.index accepts Python's and NumPy's bool, so exclude them by name.
    if type(value).__name__ not in ("bool", "bool_"):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an int, got {value!r}.")


def boolean(name: str, value: Any) -> bool:
    """Checks that an argument is True or False."""
    # Accept NumPy's bool also.
    if type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{name} must be a bool, got {value!r}.")
    return bool(value)


def positive_integer(name: str, value: Any) -> int:
    """Checks that a value is an int of at least 1."""
    value = integer(name, value)
    if value < 1:
        raise ValueError(f"{name} must be positive, got {value}.")
    return value


def count(name: str, value: Any, *others: Any) -> Any:
    """Checks that a value is a positive int or is in `others`."""
    if any(value is other or value == other for other in others):
        return value
    try:
        return positive_integer(name, value)
    except (TypeError, ValueError):
        allowed = "".join(f" or {other!r}" for other in others)
        raise ValueError(
            f"{name} must be a positive int{allowed}, got {value!r}."
        ) from None


def number(name: str, value: Any) -> float:
    """Converts an int or a float to float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    return float(value)


def positive_number(name: str, value: Any) -> float:
    """Checks that a value is positive and finite."""
    if not 0 < number(name, value) < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}.")
    return float(value)


def is_of_tf_keras(value: Any) -> bool:
    """Returns True if a class of tf_keras (Keras 2) defines an object."""
    modules = (one.__module__ for one in type(value).__mro__)
    return any(one.split(".")[0] == "tf_keras" for one in modules)
