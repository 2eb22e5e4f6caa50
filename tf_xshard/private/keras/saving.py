"""What Keras' files hold of an optimizer and of those inside it.

A store that Keras passes to `load_own_variables` shows one path of the file; an
optimizer that was saved inside another one is below that path.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

# Attributes of Keras' store of an .h5 file: the file, and the current path.
# Present in 3.12 to 3.16. Other stores show one path only.
_FILE, _PATH = "h5_file", "_h5_entry_path"
# An AGNOptimizer's local optimizer is what others have as the inner one.
_CHILDREN = ("local_optimizer", "inner_optimizer")


def levels(store: Any) -> list[list[np.ndarray]]:
    """The variables at a store's path, and at each optimizer's inside it."""
    found = [_arrays(store)]
    path = getattr(store, _PATH, None)
    for inner in _inner_paths(store):
        found.append(_arrays(store.get(inner)))
    if path is not None:
        store.get(path)
    return found


def has_local_optimizer(store: Any) -> bool:
    """Whether an AGNOptimizer's state is at a store's path, or inside it."""
    return any(path.endswith(_CHILDREN[0]) for path in _inner_paths(store))


def _inner_paths(store: Any) -> list[str]:
    """The paths of the optimizers inside the one at a store's path."""
    file, inner = getattr(store, _FILE, None), getattr(store, _PATH, None)
    found: list[str] = []
    while file is not None and inner is not None:
        # A pickled optimizer is the whole file, its path is empty.
        children = [f"{inner}/{name}".lstrip("/") for name in _CHILDREN]
        inner = next((one for one in children if one in file), None)
        if inner is not None:
            found.append(inner)
    return found


def _arrays(store: Any) -> list[np.ndarray]:
    return [np.array(store[str(i)]) for i in range(len(store.keys()))]


class _Session:
    """Holds the wrappers' wishes for the optimizers inside, for one file.

    Attributes:
      write_instead: By an optimizer's id, what to write under its path.
      skip: The ids of optimizers that have been loaded.
      saved: The ids of optimizers that have been saved.
    """

    def __init__(self) -> None:
        self.write_instead: dict[int, Callable[[Any], None]] = {}
        self.skip: set[int] = set()
        self.saved: set[int] = set()


# By Keras' store, which is one object for a whole file. Nothing is left when
# the file is closed, nor of a call with another store, such as a dict.
_sessions: weakref.WeakKeyDictionary[Any, _Session] = (
    weakref.WeakKeyDictionary()
)


def _session(store: Any) -> _Session:
    if not hasattr(store, _FILE):
        return _Session()
    return _sessions.setdefault(store, _Session())


def save_instead(
    optimizer: Any, store: Any, write: Callable[[Any], None]
) -> bool:
    """Makes Keras save something else under an optimizer's path of a file."""
    session = _session(store)
    session.write_instead[id(optimizer)] = write
    return id(optimizer) not in session.saved


def saves_something_else(optimizer: Any, store: Any) -> bool:
    """Saves what `save_instead` was given for the file, if it was called."""
    session = _session(store)
    session.saved.add(id(optimizer))
    write = session.write_instead.pop(id(optimizer), None)
    if write is not None:
        write(store)
    return write is not None


def skip_load(optimizer: Any, store: Any) -> None:
    """Makes an optimizer keep what it has when Keras loads it from a file."""
    _session(store).skip.add(id(optimizer))


def skips_this_load(optimizer: Any, store: Any) -> bool:
    """Whether `skip_load` was called for the file."""
    return id(optimizer) in _session(store).skip


def saved_variables(optimizer: Any) -> list[Any]:
    """What Keras saves for an optimizer that is no wrapper.

    A LossScaleOptimizer's are its own and those of the optimizer inside it; of
    a wrapper in between, nothing.
    """
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.variables
    inner = optimizer.inner_optimizer
    while getattr(inner, "is_tf_xshard_wrapper", False):
        inner = getattr(inner, "local_optimizer", inner.inner_optimizer)
    return optimizer._variables + saved_variables(inner)


class SavedElsewhere:
    """An optimizer whose state an outer wrapper may save and load for it."""

    def save_own_variables(self, store: Any) -> None:
        """Saves the optimizer's variables, or what a wrapper wants here."""
        if not saves_something_else(self, store):
            super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        """Loads the optimizer's variables, unless a wrapper has done so."""
        if not skips_this_load(self, store):
            super().load_own_variables(store)  # type: ignore[misc]
