"""Reads and writes an optimizer and its inner optimizers in Keras's files.

The store that Keras passes to `load_own_variables` shows one path of the file.
An optimizer that was saved inside another optimizer is below that path.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

# Attributes of Keras's store of an .h5 file: the file, and the current path. A
# store of several files has one of them open, and lists the paths of all.
# Present in 3.12 to 3.16. Other stores show one path only.
_FILE, _PATH, _ALL_FILES = "h5_file", "_h5_entry_path", "sharding_config"
# An AGNOptimizer has its local optimizer where other wrappers have the inner
# optimizer.
_CHILDREN = ("local_optimizer", "inner_optimizer")


def levels(store: Any) -> list[list[np.ndarray]]:
    """Returns the variables at a store's path, and at each path inside it."""
    found = [_arrays(store)]
    path = getattr(store, _PATH, None)
    for inner in _inner_paths(store):
        found.append(_arrays(store.get(inner)))
    if path is not None:
        store.get(path)
    return found


def has_local_optimizer(store: Any) -> bool:
    """Returns True if an AGNOptimizer's state is at or below a store's path."""
    return any(path.endswith(_CHILDREN[0]) for path in _inner_paths(store))


def _inner_paths(store: Any) -> list[str]:
    """Returns the paths of the inner optimizers below a store's path."""
    file, inner = getattr(store, _FILE, None), getattr(store, _PATH, None)
    found: list[str] = []
    while file is not None and inner is not None:
        # A pickled optimizer is the whole file, and its path is empty.
        children = [f"{inner}/{name}".lstrip("/") for name in _CHILDREN]
        inner = next((one for one in children if _has(store, one)), None)
        if inner is not None:
            found.append(inner)
    return found


def _has(store: Any, path: str) -> bool:
    """Returns True if a path, or a path below it, is in a store's files."""
    several = getattr(store, _ALL_FILES, None)
    if several is None:
        return path in getattr(store, _FILE)
    return any(
        one.startswith(f"/{path}/") for one in several.get("weight_map", ())
    )


def _arrays(store: Any) -> list[np.ndarray]:
    return [np.array(store[str(i)]) for i in range(len(store.keys()))]


class _Session:
    """Holds wrappers' requests for one file, by ids of inner optimizers.

    `write_instead` has functions that write a path instead, `skip` the
    optimizers that have been loaded, and `saved` the saved optimizers.
    """

    def __init__(self) -> None:
        self.write_instead: dict[int, Callable[[Any], None]] = {}
        self.skip: set[int] = set()
        self.saved: set[int] = set()


# The keys are Keras's stores. A store is one object for a whole file, so its
# session ends when the file is closed. A call with another store, such as a
# dict, leaves no session.
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
    """Makes Keras save something else under an optimizer's path of a file.

    Returns False if Keras has already saved the optimizer.
    """
    session = _session(store)
    session.write_instead[id(optimizer)] = write
    return id(optimizer) not in session.saved


def saves_something_else(optimizer: Any, store: Any) -> bool:
    """Saves what `save_instead` was given; returns False if it got nothing."""
    session = _session(store)
    session.saved.add(id(optimizer))
    write = session.write_instead.pop(id(optimizer), None)
    if write is not None:
        write(store)
    return write is not None


def skip_load(optimizer: Any, store: Any) -> None:
    """Makes an optimizer keep its state when Keras loads it from a file."""
    _session(store).skip.add(id(optimizer))


def skips_this_load(optimizer: Any, store: Any) -> bool:
    """Returns True if `skip_load` was called for the optimizer and the file."""
    return id(optimizer) in _session(store).skip


def saved_variables(optimizer: Any) -> list[Any]:
    """Returns the variables that Keras saves for an optimizer, not a wrapper.

    A LossScaleOptimizer also saves the variables of the optimizer inside it,
    but nothing of a wrapper in between.
    """
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.variables
    inner = optimizer.inner_optimizer
    while getattr(inner, "is_tf_xshard_wrapper", False):
        inner = getattr(inner, "local_optimizer", inner.inner_optimizer)
    return optimizer._variables + saved_variables(inner)
