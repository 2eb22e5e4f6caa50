"""What Keras' files hold of an optimizer and of those inside it.

A store that Keras passes to `load_own_variables` shows one path of the file; an
optimizer that was saved inside another one is below that path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

# Attributes of Keras' store of an .h5 file: the file, and the current path.
# Present in 3.12 to 3.15. Other stores show one path only.
_FILE, _PATH = "h5_file", "_h5_entry_path"
# An AGNOptimizer's local optimizer is what others have as the inner one.
_CHILDREN = ("local_optimizer", "inner_optimizer")


def levels(store: Any) -> list[list[np.ndarray]]:
    """The variables at a store's path, and at each optimizer's inside it.

    Args:
      store: What Keras passes to `load_own_variables`. It is left as it was.

    Returns:
      One list of arrays for each optimizer, the outermost first.
    """
    file, path = getattr(store, _FILE, None), getattr(store, _PATH, None)
    found = [_arrays(store)]
    if file is None or path is None:
        return found
    inner = path
    while True:
        # A pickled optimizer is the whole file, its path is empty.
        children = [f"{inner}/{name}".lstrip("/") for name in _CHILDREN]
        inner = next((one for one in children if one in file), None)
        if inner is None:
            break
        found.append(_arrays(store.get(inner)))
    store.get(path)
    return found


def _arrays(store: Any) -> list[np.ndarray]:
    return [np.array(store[str(i)]) for i in range(len(store.keys()))]


def save_instead(optimizer: Any, write: Callable[[Any], None]) -> None:
    """Makes an optimizer, when Keras saves it next, save something else.

    Args:
      optimizer: One that is made local, or a wrapper.
      write: A function of the store.
    """
    optimizer.__dict__["_write_instead"] = write


def saves_something_else(optimizer: Any, store: Any) -> bool:
    """Saves what `save_instead` was given, if it was called."""
    write = optimizer.__dict__.pop("_write_instead", None)
    if write is not None:
        write(store)
    return write is not None


def skip_next_load(optimizer: Any) -> None:
    """Makes an optimizer, when Keras loads it next, keep what it has."""
    optimizer.__dict__["_skips_next_load"] = True


def skips_this_load(optimizer: Any) -> bool:
    """Whether `skip_next_load` was called since the last load."""
    return optimizer.__dict__.pop("_skips_next_load", False)


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
        """Saves the optimizer's variables, or what a wrapper wants here.

        Args:
          store: A dict-like object, from Keras.
        """
        if not saves_something_else(self, store):
            super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        """Loads the optimizer's variables, unless a wrapper has done so.

        Args:
          store: A dict-like object, from Keras.
        """
        if not skips_this_load(self):
            super().load_own_variables(store)  # type: ignore[misc]
