"""Which TensorFlow and Keras this package is proven with."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

TENSORFLOW = ((2, 20), (2, 21))
KERAS = ((3, 12), (3, 15))

_INSTALL = (
    "Install one TensorFlow: pip install 'tf_xshard[cpu]' (CPUs),"
    " 'tf_xshard[tensorflow]' (GPUs) or 'tf_xshard[tpu]' (TPUs)."
)


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def check_range(name: str, version: str, proven: tuple) -> None:
    """Refuses versions that are too old and warns of ones not yet proven.

    Args:
      name: The package's name, for the message.
      version: Its version, such as "2.21.0".
      proven: The oldest and the newest proven (major, minor).

    Raises:
      ImportError: If the version is older.
    """
    oldest, newest = (".".join(map(str, bound)) for bound in proven)
    if _minor(version) < proven[0]:
        raise ImportError(
            f"tf_xshard needs {name} {oldest} to {newest}, found {version}."
            f" Upgrade: pip install -U '{name}>={oldest}'."
        )
    if _minor(version) > proven[1]:
        warnings.warn(
            f"tf_xshard is proven with {name} {oldest} to {newest}, found"
            f" {version}. `python -m tf_xshard doctor` checks the results.",
            stacklevel=3,
        )


def missing_names(names: tuple) -> list[str]:
    """Names that TensorFlow or Keras no longer has.

    Args:
      names: Pairs of a module or class and an attribute's name.

    Returns:
      The full names of those that are missing.
    """
    return [
        f"{getattr(owner, '__module__', '')}"
        f".{getattr(owner, '__name__', type(owner).__name__)}.{name}"
        for owner, name in names
        if not hasattr(owner, name)
    ]


def check_names(names: tuple) -> None:
    """Refuses a TensorFlow or Keras that has moved what this package rests on.

    Args:
      names: Pairs of a module or class and an attribute's name.

    Raises:
      ImportError: If one is missing.
    """
    missing = missing_names(names)
    if missing:
        raise ImportError(
            f"tf_xshard rests on {missing}, which this TensorFlow or Keras does"
            f" not have. Proven: TensorFlow {TENSORFLOW}, Keras {KERAS}."
        )


def check() -> None:
    """Looks for a usable TensorFlow and Keras.

    Raises:
      ImportError: If one is missing or too old, or Keras runs on another
        backend.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(f"tf_xshard found no TensorFlow. {_INSTALL}")
    tensorflow = importlib.import_module("tensorflow")
    keras = importlib.import_module("keras")
    check_range("tensorflow", tensorflow.__version__, TENSORFLOW)
    check_range("keras", keras.__version__, KERAS)
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            "tf_xshard needs Keras on TensorFlow, and Keras runs on"
            f" {keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow before"
            " Keras is imported."
        )
