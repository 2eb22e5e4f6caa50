"""Saves the state of nested optimizers in Keras's files, and loads it.

Keras saves each optimizer under its path. Wrappers come after Keras's
optimizers in a file, so that it loads into plain Keras and into other wrappers.

path in the file                   whose state is there
optimizer                          LossScaleOptimizer's    as plain Keras has it
optimizer/inner_optimizer          Adam's
.../inner_optimizer                CrossShardOptimizer's   the outermost wrapper
.../inner_optimizer                TowerOptimizer's

Loading gives each optimizer the first state with its variables' shapes and
dtypes, so the file may come from other wrappers or from plain Keras.

A save that holds only replica 0, and therefore loses state, logs a warning.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging

from tf_xshard.distribute import replica_variables
from tf_xshard.optimizers import stack
from tf_xshard.private.keras import optimizer_state
from tf_xshard.private.keras import saving as keras_saving
from tf_xshard.private.keras import wrapper_internals

# Variables of wrappers that a save may lack, in which case they are 0. The
# first step with a GlobalMean creates the sum of items. The others count skips.
ITEMS = "items"
OPTIONAL = (
    ITEMS,
    "skipped_steps",
    "skips_in_a_row",
    "skipped_local_steps",
    "steps_taken",
)


def is_optional(path: str) -> bool:
    """Returns whether a save may lack a wrapper's variable."""
    return path.split("/")[-1] in OPTIONAL


class LossySaveWarning(wrapper_internals.OwnPart):
    """Warns when a checkpoint is written, as a part of an optimizer."""

    def __init__(
        self,
        name: str,
        unsaved_state: Callable[[], str | None],
        children: Callable[[], dict],
    ) -> None:
        super().__init__(children)
        self._optimizer_name = name
        self._unsaved_state = unsaved_state
        self._has_warned = False

    def warn(self) -> None:
        """Warns once if a save would lose state."""
        lost = self._unsaved_state()
        if lost and not self._has_warned:
            self._has_warned = True
            logging.warning(
                "%s %s Keras and TensorFlow save one value for all replicas."
                " tf_xshard.GroupState(model).save(directory) saves the values"
                " of all replicas, and .export(group, path) saves one group as"
                " a model.",
                self._optimizer_name,
                lost,
            )

    def warn_in_legacy_save(self) -> None:
        """Calls `warn` if the config is read to write a legacy .h5 file."""
        if optimizer_state.is_writing_legacy_file():
            self.warn()

    def serialize(self) -> str:
        """Warns when a checkpoint is written, and stores nothing."""
        self.warn()
        return ""

    def deserialize(self, string_value: str) -> None:
        """Does nothing when a checkpoint is read."""


def save(root: Any, store: Any) -> None:
    """Saves a stack when Keras calls the outermost optimizer."""
    chain = _chain(root)
    first, *others = _in_order(chain)
    lost = []
    for one, saved in zip(chain[1:], others, strict=True):
        is_written = keras_saving.save_instead(
            one, store, functools.partial(_write, saved)
        )
        if not is_written and stack.is_wrapper(saved) and _variables(saved):
            lost.append(saved.name)
    _write(first, store)
    if lost:
        warnings.warn(
            f"The state of {lost} is not saved: the model also holds an"
            f" optimizer inside {root.name} as an attribute, and Keras saves an"
            " object only once. Remove the attribute, or use"
            " tf_xshard.GroupState or tf.train.Checkpoint.",
            stacklevel=3,
        )


def load(root: Any, store: Any) -> None:
    """Loads a stack when Keras calls the outermost optimizer."""
    chain = _chain(root)
    levels = [level for level in keras_saving.levels(store) if level]
    for one in chain[1:]:
        keras_saving.skip_load(one, store)
    fresh = []
    for one in _in_order(chain):
        if not _variables(one):
            continue
        index, level = _first_fitting(one, levels)
        if index is None:
            if not stack.is_wrapper(one) or one._required_variables:
                fresh.append(one.name)
            continue
        levels = levels[:index] + levels[index + 1 :]
        # A MultiOptimizer's state includes the state of its optimizers.
        for inner in () if stack.is_wrapper(one) else stack.descendants(one):
            if inner not in chain:
                keras_saving.skip_load(inner, store)
        for variable, value in zip(_variables(one), level, strict=True):
            variable.assign(value)
    if not keras_saving.has_local_optimizer(store):
        # Keras would look for the center's state at another optimizer's path.
        for center in _center_optimizers(chain):
            keras_saving.skip_load(center, store)
            fresh.append(center.name)
    if levels and not root.built:
        warnings.warn(
            f"{root.name} has not been built, so state in the file is not"
            f" loaded: {sum(map(len, levels))} variables. To load it, call"
            " optimizer.build(model.trainable_variables) first.",
            stacklevel=3,
        )
    elif (fresh or levels) and root.built:
        warnings.warn(
            f"The file was saved with other optimizers than {root.name}."
            + (f" {fresh} start fresh." if fresh else "")
            + (
                f" There is no place for {sum(map(len, levels))} of the file's"
                " variables."
                if levels
                else ""
            ),
            stacklevel=3,
        )


def _first_fitting(one: Any, levels: Sequence) -> tuple[int | None, Sequence]:
    """Returns the first level that fits an optimizer, and its index."""
    for index, level in enumerate(levels):
        if _fits(level, _variables(one)):
            return index, level
    if stack.is_wrapper(one):
        for index, level in enumerate(levels):
            completed = one._completed(level)
            if _fits(completed, _variables(one)):
                return index, completed
    return None, ()


def _chain(root: Any) -> list[Any]:
    """Returns an optimizer and the optimizers that `inside` finds in it."""
    chain = [root]
    while hasattr(chain[-1], "inner_optimizer"):
        chain.append(inside(chain[-1]))
    return chain


def inside(optimizer: Any) -> Any:
    """Returns the inner optimizer, or AGNOptimizer's local optimizer."""
    return getattr(optimizer, "local_optimizer", optimizer.inner_optimizer)


def _center_optimizers(chain: Sequence[Any]) -> list[Any]:
    """Returns the optimizers of the center, which are not in the chain."""
    return [
        inner
        for one in chain
        if hasattr(one, "local_optimizer")
        for inner in stack.descendants(one.inner_optimizer)
    ]


def _in_order(chain: Sequence[Any]) -> list[Any]:
    return sorted(chain, key=stack.is_wrapper)  # The sort is stable.


def _variables(optimizer: Any) -> list[Any]:
    if stack.is_wrapper(optimizer):
        return optimizer._own_variables
    return keras_saving.saved_variables(optimizer)


def _write(optimizer: Any, store: Any) -> None:
    for index, variable in enumerate(_variables(optimizer)):
        store[str(index)] = variable.numpy()


def _fits(level: Sequence[np.ndarray], variables: Sequence[Any]) -> bool:
    return len(level) == len(variables) and all(
        array.shape == tuple(variable.shape)
        and replica_variables.takes(_dtype(variable), array.dtype.name)
        for array, variable in zip(level, variables, strict=True)
    )


def _dtype(variable: Any) -> str:
    return replica_variables.copies(variable)[0].dtype.name
