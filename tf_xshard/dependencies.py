"""Lists the tested versions of TensorFlow, Keras and jax; checks for them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Sequence

from packaging import specifiers
from packaging import version

Minor = tuple[int, int]

# What the tests run on; setup.cfg has the same. Newer ones of Keras warn.
_TESTED = {
    "tensorflow": ">=2.20,<2.23",
    "keras": ">=3.12,<3.17",
    "jax": ">=0.10.2,<0.13",
    "jaxlib": ">=0.10.2,<0.13",
    # 0.0.51 can't compile for tpu7x with jax 0.10.2.
    "libtpu": "==0.0.42.1",
}
# They install into one folder.
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu")
_INSTALL = (
    "Install one TensorFlow: pip install 'tf_xshard[cpu]' (CPUs),"
    " 'tf_xshard[tensorflow]' (GPUs) or 'tf_xshard[tpu]' (TPUs)."
)


def specifier(distribution: str) -> specifiers.SpecifierSet:
    """Returns the tested versions."""
    return specifiers.SpecifierSet(_TESTED[distribution], prereleases=True)


def tested(distribution: str) -> tuple[Minor, Minor]:
    """Returns the oldest and the newest tested (major, minor) version."""
    bounds = {
        one.operator: _minor(one.version) for one in specifier(distribution)
    }
    major, minor = bounds["<"]
    return bounds[">="], (major, minor - 1)


def tested_range(distribution: str) -> str:
    """Returns the tested versions for error texts, such as "3.12 to 3.16"."""
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
    check_range("tensorflow", tensorflow.__version__, tested("tensorflow"))
    check_range("keras", keras.__version__, tested("keras"))
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            "tf_xshard needs Keras on TensorFlow, but Keras runs on"
            f" {keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow before"
            " Keras is imported."
        )
