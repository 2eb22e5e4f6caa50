"""Reads the tested versions of TensorFlow and Keras, and checks for them.

The versions are in the package's metadata or, in a checkout, in setup.cfg.
"""

from __future__ import annotations

import configparser
import contextlib
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

# They install into one folder.
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu")
_INSTALL = (
    "Install one TensorFlow: pip install 'tf_xshard[cpu]' (CPUs),"
    " 'tf_xshard[tensorflow]' (GPUs) or 'tf_xshard[tpu]' (TPUs)."
)


@functools.cache
def requirements() -> tuple[str, ...]:
    """Returns all requirements, such as 'keras<3.17; extra == "tested"'."""
    try:
        return tuple(importlib.metadata.requires("tf_xshard") or ())
    except importlib.metadata.PackageNotFoundError:
        return _from_checkout()


def _from_checkout() -> tuple[str, ...]:
    config = configparser.ConfigParser()
    config.read(pathlib.Path(__file__).parents[1] / "setup.cfg")
    # Another project may contain a copy of this package and its own setup.cfg.
    if config.get("metadata", "name", fallback=None) != "tf_xshard":
        return ()
    lines = config["options"]["install_requires"].split("\n")
    for value in config["options.extras_require"].values():
        lines += value.split("\n")
    return tuple(line for line in lines if line)


def specifier(distribution: str) -> specifiers.SpecifierSet:
    """Returns the versions that the package and all its extras allow."""
    found = specifiers.SpecifierSet(prereleases=True)
    for line in requirements():
        # Drop the marker, which names the extra that has the requirement.
        requirement = packaging_requirements.Requirement(line.split(";")[0])
        if requirement.name == distribution:
            found &= requirement.specifier
    return found


def tested(distribution: str) -> tuple[Minor, Minor]:
    """Returns the oldest and the newest tested (major, minor) version."""
    # The newest tested version is just below the smallest upper bound. Keras's
    # bound is in the extra `[tested]`, since the package allows newer versions.
    bounds = specifier(distribution)
    oldest = max(_minor(one.version) for one in bounds if one.operator == ">=")
    bound = min(_minor(one.version) for one in bounds if one.operator == "<")
    return oldest, (bound[0], bound[1] - 1)


def tested_range(distribution: str) -> str:
    """Returns the tested versions for error texts, such as "3.12 to 3.16"."""
    # A copy of the package without metadata does not know the versions.
    if not requirements():
        return "unknown versions"
    return " to ".join(".".join(map(str, one)) for one in tested(distribution))


def _minor(text: str) -> Minor:
    release = version.Version(text).release
    return release[0], (*release, 0)[1]


def check_range(name: str, found: str, range_: tuple[Minor, Minor]) -> None:
    """Raises ImportError for an old version; warns of an untested new one."""
    oldest, newest = (".".join(map(str, bound)) for bound in range_)
    if _minor(found) < range_[0]:
        raise ImportError(
            f"tf_xshard needs {name} {oldest} to {newest}, found {found}."
            f" Upgrade: pip install -U '{name}>={oldest}'."
        )
    if _minor(found) > range_[1]:
        warnings.warn(
            f"tf_xshard is tested with {name} {oldest} to {newest}, found"
            f" {found}. Run `python -m tf_xshard doctor` to check the results.",
            stacklevel=3,
        )


def refuse_moved(feature: str, names: Sequence[str]) -> None:
    """Raises ImportError if private `names` that `feature` needs have moved."""
    if not names:
        return
    raise ImportError(
        f"{feature} needs {list(names)}, which the installed TensorFlow, Keras"
        " or jax does not have. tf_xshard is tested with TensorFlow"
        f" {tested_range('tensorflow')} and Keras {tested_range('keras')}."
        " Install tested versions: pip install 'tf_xshard[cpu,tested]'."
    )


def _refuse_mixed_tensorflows() -> None:
    found = {}
    for name in _TENSORFLOWS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if len(set(found.values())) > 1:
        packages = " and ".join(" ".join(one) for one in found.items())
        raise ImportError(
            f"tf_xshard found {packages}, which have overwritten each other's"
            " files. tf_keras requires the package tensorflow. Make a new"
            f" environment. {_INSTALL}"
        )


def check() -> None:
    """Raises ImportError if TensorFlow or Keras is missing or unusable."""
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(f"tf_xshard found no TensorFlow. {_INSTALL}")
    _refuse_mixed_tensorflows()
    tensorflow = importlib.import_module("tensorflow")
    keras = importlib.import_module("keras")
    # A copy of the package without metadata has no versions to compare with.
    if requirements():
        check_range("tensorflow", tensorflow.__version__, tested("tensorflow"))
        check_range("keras", keras.__version__, tested("keras"))
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            "tf_xshard needs Keras on TensorFlow, but Keras runs on"
            f" {keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow before"
            " Keras is imported."
        )
