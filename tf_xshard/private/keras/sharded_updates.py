"""Keras optimizers whose variables are shards: mixins of the class swap.

See `shards` for the variables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.private import names
from tf_xshard.private.keras import shards as keras_shards

_OPTIMIZER = "keras.optimizers.Optimizer."
# Present in Keras 3.12 to 3.16.
NAMES = names.PrivateNames(
    "CrossShardOptimizer(shard_update=True)",
    {
        # Called with each variable that an optimizer creates, before anything
        # is restored into it.
        "track_variable": _OPTIMIZER + "_track_variable",
        # Called with each attribute that tf.train.Checkpoint is to find.
        "track_trackable": _OPTIMIZER + "_track_trackable",
        # What an optimizer looks variables up by.
        "var_key": _OPTIMIZER + "_var_key",
        # Clips by norms of what it is given: of shards.
        "clip": _OPTIMIZER + "_clip_gradients",
    },
)
# An attribute used the same way: what MultiOptimizer calls in `build` for a
# variable's optimizer.
names.attributes("MultiOptimizer in a tf_xshard optimizer", "_optimizer_map")


class TracksWholes(keras.optimizers.Optimizer):
    """For a checkpoint, an optimizer has whole weights, not their shards.

    It would restore a weight into its shards, which are no state, and then
    leave the model's own as it is.
    """

    def _track_trackable(
        self, trackable: Any, name: str, overwrite: bool = False
    ) -> Any:
        if name == "_trainable_variables":
            trackable = _of_wholes(trackable)
        return super()._track_trackable(trackable, name, overwrite)


class UpdatesShards(TracksWholes):
    """An optimizer that can be built with `Sharded` variables.

    Its slot variables are then sharded as well, and it knows a weight by its
    shards.
    """

    def add_variable_from_reference(
        self,
        reference_variable: Any,
        name: str | None = None,
        initializer: Any = "zeros",
    ) -> Any:
        """Creates a slot variable: see Keras."""
        add = super().add_variable_from_reference
        if not isinstance(reference_variable, keras_shards.Sharded):
            return add(reference_variable, name=name, initializer=initializer)
        self.__dict__["_slot_of"] = reference_variable, initializer
        # Only a shard's memory is ever allocated for it.
        reference_variable.__dict__["_is_reference"] = True
        try:
            return add(reference_variable, name=name)
        finally:
            del reference_variable.__dict__["_is_reference"]
            del self.__dict__["_slot_of"]

    def _track_variable(self, variable: Any) -> None:
        reference, initializer = self.__dict__.get("_slot_of", (None, None))
        if reference is not None:
            # Before what was read for it from a checkpoint is assigned.
            slot = keras_shards.converted(
                variable, reference.layout, reference.store
            )
            initializer = keras.initializers.get(initializer)
            if not isinstance(initializer, keras.initializers.Zeros):
                slot.assign(initializer(slot.layout.shape, slot.dtype))
        super()._track_variable(variable)

    def assign(self, variable: Any, value: Any) -> None:
        """Assigns a value: while it is built, on all replicas."""
        copies = getattr(getattr(variable, "value", None), "values", None)
        if (
            isinstance(variable, keras_shards.Sharded)
            and keras_shards.is_outside()
        ):
            variable.assign(value)
        elif keras_shards.is_building() and copies:
            for copy in copies:
                copy.assign(tf.cast(value, copy.dtype))
        else:
            super().assign(variable, value)

    def _var_key(self, variable: Any) -> Any:
        if isinstance(variable, keras_shards.Sharded):
            variable = variable.whole
        return super()._var_key(variable)

    def _clip_gradients(self, grads: Sequence) -> Sequence:
        clip = self.__dict__.get("_clip_shards")
        if clip is None:
            return super()._clip_gradients(grads)
        return clip(self, grads)


def _of_wholes(variables: Sequence) -> Sequence:
    """Weights in place of their shards, in a list that can be tracked."""
    if not any(isinstance(one, keras_shards.Sharded) for one in variables):
        return variables
    tracked = tf.Module()
    tracked.wholes = [
        one.whole if isinstance(one, keras_shards.Sharded) else one
        for one in variables
    ]
    return tracked.wholes


def clip_with(optimizer: keras.optimizers.Optimizer, clip: Callable) -> None:
    """Replaces how an optimizer clips the gradients of shards."""
    optimizer.__dict__["_clip_shards"] = clip


@contextlib.contextmanager
def changes_when_chosen(
    optimizer: keras.optimizers.Optimizer, change: Callable
) -> Iterator[None]:
    """A context in which an optimizer is built, and MultiOptimizer may choose.

    Its function is called with weights, not with their shards.
    """
    chosen = getattr(optimizer, "_optimizer_map", None)
    if chosen is None:
        yield
        return

    def choose(variable: Any) -> Any:
        if isinstance(variable, keras_shards.Sharded):
            variable = variable.whole
        result = chosen(variable)
        change(result)
        return result

    object.__setattr__(optimizer, "_optimizer_map", choose)
    try:
        yield
    finally:
        object.__setattr__(optimizer, "_optimizer_map", chosen)
