"""Makes Keras optimizers create and update `shards.Sharded` variables.

Its classes are mixins of the class swap in `local_optimizers`.
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
        # Called with each attribute that tf.train.Checkpoint must find.
        "track_trackable": _OPTIMIZER + "_track_trackable",
        # Returns the key by which an optimizer looks up a variable.
        "var_key": _OPTIMIZER + "_var_key",
        # Clips by the norms of its arguments, which are shards.
        "clip": _OPTIMIZER + "_clip_gradients",
    },
)
# MultiOptimizer calls this attribute in `build` for a variable's optimizer.
names.attributes("MultiOptimizer in a tf_xshard optimizer", "_optimizer_map")


class TracksWholes(keras.optimizers.Optimizer):
    """An optimizer that checkpoints see with whole weights, not with shards.

    Otherwise, a checkpoint would restore a weight into its shards, which are
    not state, and leave the model's weight unchanged.
    """

    def _track_trackable(
        self, trackable: Any, name: str, overwrite: bool = False
    ) -> Any:
        if name == "_trainable_variables":
            trackable = _of_wholes(trackable)
        return super()._track_trackable(trackable, name, overwrite)


class UpdatesShards(TracksWholes):
    """An optimizer that can be built with `Sharded` variables.

    Its slot variables are then also sharded. A weight and its shards have the
    same key.
    """

    def add_variable_from_reference(
        self,
        reference_variable: Any,
        name: str | None = None,
        initializer: Any = "zeros",
    ) -> Any:
        """Creates a slot variable, sharded like its reference variable."""
        add = super().add_variable_from_reference
        if not isinstance(reference_variable, keras_shards.Sharded):
            return add(reference_variable, name=name, initializer=initializer)
        self.__dict__["_slot_of"] = reference_variable, initializer
        try:
            with reference_variable.as_reference():
                return add(reference_variable, name=name)
        finally:
            del self.__dict__["_slot_of"]

    def _track_variable(self, variable: Any) -> None:
        reference, initializer = self.__dict__.get("_slot_of", (None, None))
        if reference is not None:
            # Convert the variable before Keras assigns a checkpoint's value.
            slot = keras_shards.converted(
                variable, reference.layout, reference.store
            )
            initializer = keras.initializers.get(initializer)
            if not isinstance(initializer, keras.initializers.Zeros):
                slot.assign(initializer(slot.layout.shape, slot.dtype))
        super()._track_variable(variable)

    def assign(self, variable: Any, value: Any) -> None:
        """Assigns a value; on all replicas while the optimizer is built."""
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
    """Replaces shards by their weights, in a list that can be tracked."""
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
    """Calls `change` with each optimizer that a MultiOptimizer chooses.

    The MultiOptimizer's function is called with weights, not with their shards.
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
