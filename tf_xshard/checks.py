"""Checks of arguments that several modules take.

Each returns what it was given, in one type, or raises with what was received,
what was expected and the name of the argument.
"""

from __future__ import annotations

import math
import operator
from typing import Any


def integer(name: str, value: Any) -> int:
    """An int of any integer type; a bool is none.

    Args:
      name: The argument's name.
      value: What was given.

    Returns:
      An int.

    Raises:
      TypeError: If it is no integer.
    """
    # NumPy's bool and Python's are integers for operator.index.
    if type(value).__name__ not in ("bool", "bool_"):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an int, got {value!r}.")


def positive_integer(name: str, value: Any) -> int:
    """An int that is at least 1.

    Args:
      name: The argument's name.
      value: What was given.

    Returns:
      An int.

    Raises:
      TypeError: If it is no integer.
      ValueError: If it is less than 1.
    """
    value = integer(name, value)
    if value < 1:
        raise ValueError(f"{name} must be positive, got {value}.")
    return value


def count(name: str, value: Any, *others: Any) -> None:
    """Checks an argument that is a positive int, or one of a few other values.

    Args:
      name: The argument's name.
      value: What was given.
      *others: What it may be besides.

    Raises:
      ValueError: If it is neither.
    """
    if any(value is other or value == other for other in others):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        allowed = "".join(f" or {other!r}" for other in others)
        raise ValueError(
            f"{name} must be a positive int{allowed}, got {value!r}."
        )


def number(name: str, value: Any) -> float:
    """A float, of an int or a float.

    Args:
      name: The argument's name.
      value: What was given.

    Returns:
      A float.

    Raises:
      TypeError: If it is neither.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    return float(value)


def positive_number(name: str, value: Any) -> float:
    """A float that is positive and finite.

    Args:
      name: The argument's name.
      value: What was given.

    Returns:
      A float.

    Raises:
      TypeError: If it is no number.
      ValueError: If it is not positive and finite.
    """
    if not 0 < number(name, value) < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}.")
    return float(value)
