"""Which TensorFlow and Keras this package is proven with.

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
import re
import warnings

Minor = tuple[int, int]

_INSTALL = (
    "Install one TensorFlow: pip install 'tf_xshard[cpu]' (CPUs),"
    " 'tf_xshard[tensorflow]' (GPUs) or 'tf_xshard[tpu]' (TPUs)."
)


@functools.cache
def requirements() -> tuple[str, ...]:
    """The package's requirements, including those of its extras.

    Returns:
      Strings such as "keras<4,>=3.12" or 'jax==0.10.2; extra == "testing"'.
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
    for extra, value in config["options.extras_require"].items():
        lines += [f'{line}; extra == "{extra}"' for line in value.split("\n")]
    return tuple(line for line in lines if line.strip(" ;") and line[0] != ";")


def versions(distribution: str, specifier: str) -> list[str]:
    """Versions that follow a specifier in the requirements.

    Args:
      distribution: A distribution's name.
      specifier: ">=", "<" or "==".

    Returns:
      The versions, in order of the requirements.
    """
    found = []
    for requirement in requirements():
        text = requirement.partition(";")[0]
        name = re.match(r"[\w.-]+", text)
        if name and name[0] == distribution:
            found += re.findall(rf"(?<![<>=!~]){specifier}\s*([\d.]+)", text)
    return found


def proven(distribution: str) -> tuple[Minor, Minor]:
    """The oldest and the newest minor version that tests have run with.

    Args:
      distribution: "tensorflow" or "keras".

    Returns:
      Two (major, minor) pairs. The newest is just below the smallest upper
      bound; for Keras that is in `[proven]`, since newer versions are allowed.
    """
    oldest = _minor(versions(distribution, ">=")[0])
    bound = min(_minor(one) for one in versions(distribution, "<"))
    return oldest, (bound[0], bound[1] - 1)


def proven_range(distribution: str) -> str:
    """The versions that tests have run with, for people: "3.12 to 3.15"."""
    # A copy of the package without metadata does not know.
    if not requirements():
        return "unknown versions"
    return " to ".join(".".join(map(str, one)) for one in proven(distribution))


def _minor(version: str) -> Minor:
    major, minor, *_ = [*version.split("."), "0"]
    return int(major), int(minor)


def check_range(name: str, version: str, range_: tuple[Minor, Minor]) -> None:
    """Refuses versions that are too old, and warns if one is not yet proven.

    Args:
      name: The package's name, for the message.
      version: Its version, such as "2.21.0".
      range_: The oldest and the newest proven (major, minor).

    Raises:
      ImportError: If the version is older.
    """
    oldest, newest = (".".join(map(str, bound)) for bound in range_)
    if _minor(version) < range_[0]:
        raise ImportError(
            f"tf_xshard needs {name} {oldest} to {newest}, found {version}."
            f" Upgrade: pip install -U '{name}>={oldest}'."
        )
    if _minor(version) > range_[1]:
        warnings.warn(
            f"tf_xshard is proven with {name} {oldest} to {newest}, found"
            f" {version}. `python -m tf_xshard doctor` checks the results.",
            stacklevel=3,
        )


def missing_names(names: tuple) -> list[str]:
    """Names that this TensorFlow or Keras does not have.

    Args:
      names: Pairs of a module or class and an attribute's name.

    Returns:
      The full names of the missing ones.
    """
    return [
        f"{getattr(owner, '__module__', '')}"
        f".{getattr(owner, '__name__', type(owner).__name__)}.{name}"
        for owner, name in names
        if not hasattr(owner, name)
    ]


def check_names(names: tuple) -> None:
    """Refuses a TensorFlow or Keras that has moved a private name.

    Args:
      names: Pairs of a module or class and an attribute's name.

    Raises:
      ImportError: If one is missing.
    """
    missing = missing_names(names)
    if missing:
        raise ImportError(
            f"tf_xshard depends on {missing}, which this TensorFlow or Keras"
            f" does not have. Proven: TensorFlow"
            f" {proven_range('tensorflow')}, Keras {proven_range('keras')}."
            " Install these: pip install 'tf_xshard[cpu,proven]'."
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
        check_range("tensorflow", tensorflow.__version__, proven("tensorflow"))
        check_range("keras", keras.__version__, proven("keras"))
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            "tf_xshard needs Keras on TensorFlow, but Keras runs on"
            f" {keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow before"
            " Keras is imported."
        )
