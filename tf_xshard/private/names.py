"""Declares private names by path, and resolves them on first use.

An `import` statement of a name that a new version has moved would break
`import tf_xshard` for everyone. A declared name only breaks the feature that
needs it. The error says which name has moved and which versions have it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from tf_xshard import dependencies

# All declared names, for the tests.
DECLARED: list[PrivateNames] = []
# Maps features to the attributes that they need and only instances have.
ATTRIBUTES: dict[str, tuple[str, ...]] = {}


def attributes(feature: str, *found: str) -> tuple[str, ...]:
    """Declares attributes that only instances have, and returns them."""
    ATTRIBUTES[feature] = (*ATTRIBUTES.get(feature, ()), *found)
    return found


class PrivateNames:
    """Holds the private names of one feature, as attributes."""

    def __init__(
        self, feature: str, names: Mapping[str, str | tuple[str, ...]]
    ) -> None:
        self.feature = feature
        self.paths = {
            name: (paths,) if isinstance(paths, str) else tuple(paths)
            for name, paths in names.items()
        }
        self._found: dict[str, Any] = {}
        DECLARED.append(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.check()
        return self._found[name]

    def missing(self) -> list[str]:
        """Lists the paths that this TensorFlow, Keras or jax does not have."""
        missing = []
        for name, paths in self.paths.items():
            for path in paths:
                try:
                    self._found[name] = _resolved(path)
                    break
                except (ModuleNotFoundError, AttributeError):
                    continue
            else:
                missing.append(" or ".join(paths))
        return missing

    def check(self) -> None:
        """Raises ImportError if a name does not exist."""
        if len(self._found) == len(self.paths):
            return
        dependencies.refuse_moved(self.feature, self.missing())


def _resolved(path: str) -> Any:
    """Returns a module, or an attribute of a module or of a class in it."""
    owner, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        if not owner:
            raise
    return getattr(_resolved(owner), name)


def defining_class(owner: type, name: str) -> type | None:
    """Returns the first class of an inheritance order that defines a name."""
    # Keras moves and renames its classes more often than their methods.
    return next((one for one in owner.__mro__ if name in vars(one)), None)
