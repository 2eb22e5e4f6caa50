"""The versions of jax and libtpu that simulation and compilation need."""

from __future__ import annotations

import importlib.metadata

from tf_xshard import dependencies

# Both need names that jax does not export, and versions of libtpu support
# different TPUs: 0.0.51 with jax 0.10.2 can't compile for tpu7x. setup.cfg pins
# them.
[JAX, *_] = dependencies.versions("jax", "==")
[LIBTPU, *_] = dependencies.versions("libtpu", "==")

_INSTALL = "pip install 'tf_xshard[cpu,testing]' in an environment of its own"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_jax() -> None:
    """Checks the versions that `simulated_tpu_strategy` needs.

    Raises:
      ImportError: If jax or jaxlib is missing or of another version, or if
        tensorflow-tpu is installed in the same environment.
    """
    if _version("tensorflow-tpu") is not None:
        raise ImportError(
            "tf_xshard.testing can't share an environment with tensorflow-tpu:"
            f" it needs libtpu {LIBTPU}, tensorflow-tpu needs another version."
            f" Use {_INSTALL}."
        )
    _check("jax", JAX)
    _check("jaxlib", JAX)


def check_libtpu() -> None:
    """Checks the version that `compile_for_tpu` needs.

    Raises:
      ImportError: If libtpu is missing or of another version.
    """
    _check("libtpu", LIBTPU)


def _check(distribution: str, tested: str) -> None:
    found = _version(distribution)
    if found == tested:
        return
    where = ""
    if distribution == "libtpu":
        where = " (Linux x86-64 only)"
    raise ImportError(
        f"tf_xshard.testing needs {distribution} {tested}{where}, found"
        f" {found or 'none'}: {_INSTALL}."
    )
