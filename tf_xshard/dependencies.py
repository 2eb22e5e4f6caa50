"""Which TensorFlow and Keras this package is tested with.

The versions are in setup.cfg. They are read from the installed package's
metadata, or from that file in a checkout that is not installed.
"""

from __future__ import annotations

import configparser
import functools
import importlib
import importlib.metadata
import importlib.util
import pathlib
import warnings
from collections.abc import Sequence

from packaging import requirements as packaging_requirements
from packaging import specifiers
from packaging import version

Minor = tuple[int, int]

_INSTALL = (
    "Install one TensorFlow: pip install 'tf_xshard[cpu]' (CPUs),"
    " 'tf_xshard[tensorflow]' (GPUs) or 'tf_xshard[tpu]' (TPUs)."
)


@functools.cache
def requirements() -> tuple[str, ...]:
    """The package's requirements, including those of its extras.

    Returns:
      Strings such as "keras<4,>=3.12" or 'keras<3.17; extra == "tested"'.
    """
    try:
        return tuple(importlib.metadata.requires("tf_xshard") or ())
    except importlib.metadata.PackageNotFoundError:
        return _from_checkout()


def _from_checkout() -> tuple[str, ...]:
    config = configparser.ConfigParser()
    config.read(pathlib.Path(__file__).parents[1] / "setup.cfg")
    # Where the package has been copied, that file is another project's.
    if config.get("metadata", "name", fallback=None) != "tf_xshard":
        return ()
    lines = config["options"]["install_requires"].split("\n")
    for value in config["options.extras_require"].values():
        lines += value.split("\n")
    return tuple(line for line in lines if line)


def specifier(distribution: str) -> specifiers.SpecifierSet:
    """The versions of a distribution that all of the requirements allow.

    Args:
      distribution: A distribution's name.

    Returns:
      The conditions of the package and of all extras together.
    """
    found = specifiers.SpecifierSet(prereleases=True)
    for line in requirements():
        # Without the marker, which says for which extra it is.
        requirement = packaging_requirements.Requirement(line.split(";")[0])
        if requirement.name == distribution:
            found &= requirement.specifier
    return found


def tested(distribution: str) -> tuple[Minor, Minor]:
    """The oldest and the newest minor version that tests have run with.

    Args:
      distribution: "tensorflow" or "keras".

    Returns:
      Two (major, minor) pairs. The newest is just below the smallest upper
      bound; for Keras that is in `[tested]`, since newer versions are allowed.
    """
    bounds = specifier(distribution)
    oldest = max(_minor(one.version) for one in bounds if one.operator == ">=")
    bound = min(_minor(one.version) for one in bounds if one.operator == "<")
    return oldest, (bound[0], bound[1] - 1)


def tested_range(distribution: str) -> str:
    """The versions that tests have run with, for people: "3.12 to 3.16"."""
    # A copy of the package without metadata does not know.
    if not requirements():
        return "unknown versions"
    return " to ".join(".".join(map(str, one)) for one in tested(distribution))


def _minor(text: str) -> Minor:
    release = version.Version(text).release
    return release[0], (*release, 0)[1]


def check_range(name: str, found: str, range_: tuple[Minor, Minor]) -> None:
    """Refuses versions that are too old, and warns of one newer than tested.

    Args:
      name: The package's name, for the message.
      found: Its version, such as "2.21.0".
      range_: The oldest and the newest tested (major, minor).

    Raises:
      ImportError: If the version is older.
    """
    oldest, newest = (".".join(map(str, bound)) for bound in range_)
    if _minor(found) < range_[0]:
        raise ImportError(
            f"tf_xshard needs {name} {oldest} to {newest}, found {found}."
            f" Upgrade: pip install -U '{name}>={oldest}'."
        )
    if _minor(found) > range_[1]:
        warnings.warn(
            f"tf_xshard is tested with {name} {oldest} to {newest}, found"
            f" {found}. `python -m tf_xshard doctor` checks the results.",
            stacklevel=3,
        )


def refuse_moved(feature: str, names: Sequence[str]) -> None:
    """Raises the error for private names that a new version has moved.

    Args:
      feature: What needs the names, the subject of the sentence.
      names: The full names. Nothing happens if there are none.

    Raises:
      ImportError: If there are any.
    """
    if not names:
        return
    raise ImportError(
        f"{feature} needs {list(names)}, which the installed TensorFlow, Keras"
        " or jax does not have. tf_xshard is tested with TensorFlow"
        f" {tested_range('tensorflow')} and Keras {tested_range('keras')}."
        " Install these: pip install 'tf_xshard[cpu,tested]'."
    )


def check() -> None:
    """Checks for a usable TensorFlow and Keras.

    Raises:
      ImportError: If one is missing or too old, or Keras runs on another
        backend.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(f"tf_xshard found no TensorFlow. {_INSTALL}")
    tensorflow = importlib.import_module("tensorflow")
    keras = importlib.import_module("keras")
    # A copy of the package without metadata has nothing to compare with.
    if requirements():
        check_range("tensorflow", tensorflow.__version__, tested("tensorflow"))
        check_range("keras", keras.__version__, tested("keras"))
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            "tf_xshard needs Keras on TensorFlow, but Keras runs on"
            f" {keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow before"
            " Keras is imported."
        )
