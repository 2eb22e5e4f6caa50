"""Checks the versions of jax and libtpu that are installed."""

from __future__ import annotations

import importlib.metadata

from tf_xshard import dependencies

# Versions of libtpu support different TPUs, so there is one.
[LIBTPU] = {one.version for one in dependencies.specifier("libtpu")}

_INSTALL = "pip install 'tf_xshard[cpu,testing]' in a separate environment"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_jax() -> None:
    """Raises ImportError if `simulated_tpu_strategy` needs other versions."""
    if _version("tensorflow-tpu") is not None:
        raise ImportError(
            "tf_xshard.testing can't share an environment with tensorflow-tpu:"
            f" it needs libtpu {LIBTPU}, but tensorflow-tpu needs another"
            f" version. Run {_INSTALL}."
        )
    _check("jax")
    _check("jaxlib")


def check_libtpu() -> None:
    """Raises ImportError if `compile_for_tpu` needs another version."""
    _check("libtpu")


def _check(distribution: str) -> None:
    found = _version(distribution)
    tested = dependencies.specifier(distribution)
    if found is not None and tested.contains(found):
        return
    where = ""
    if distribution == "libtpu":
        where = " for compile_for_tpu (Linux x86-64 only)"
    raise ImportError(
        f"tf_xshard.testing needs {distribution}{tested}{where}, found"
        f" {found or 'none'}. Run {_INSTALL}."
    )
