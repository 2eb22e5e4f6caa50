"""Keras variables of which each replica holds a shard.

Inside `strategy.run` such a variable is this replica's shard, which Keras'
optimizers update as any other variable. Outside of it the variable is whole:
its shape, its value, what is saved, and what is assigned to it. So files and
checkpoints do not show how it is split.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import dependencies

# Keras' private names, each with the reason. Present in 3.12 to 3.15.
KERAS_PRIVATE_NAMES = (
    # The write behind every assign of a Keras variable.
    (keras.Variable, "_direct_assign"),
    # What tf.train.Checkpoint writes and reads.
    (keras.Variable, "_serialize_to_tensors"),
    (keras.Variable, "_restore_from_tensors"),
    (keras.Variable, "_shared_name"),
    # Called with each variable that an optimizer creates, before anything is
    # restored into it.
    (keras.optimizers.Optimizer, "_track_variable"),
    # What an optimizer looks variables up by.
    (keras.optimizers.Optimizer, "_var_key"),
    # Clips by norms of what it is given: of shards.
    (keras.optimizers.Optimizer, "_clip_gradients"),
)
dependencies.check_names(KERAS_PRIVATE_NAMES)
# Attributes used the same way: a variable's TensorFlow variable, its path and
# name, and what MultiOptimizer calls in `build` for a variable's optimizer.
KERAS_PRIVATE_ATTRIBUTES = ("_value", "_path", "_name", "_optimizer_map")
_KEY = "VARIABLE_VALUE"


class Store(Protocol):
    """Reads and writes whole variables, outside of `strategy.run`."""

    def read(self, slot: Sharded) -> tf.Tensor:
        """The whole value, in the group of this process's first replica."""

    def write(self, slot: Sharded, value: tf.Tensor) -> None:
        """Writes a whole value to all replicas of this process."""

    def write_into(self, slot: Sharded, variable: Any) -> None:
        """Writes each replica's whole value to its copy of a variable."""


_thread = threading.local()


@contextlib.contextmanager
def building() -> Iterator[None]:
    """A context in which an optimizer is built, for all replicas at once.

    The first step may build it, inside `strategy.run`.
    """
    before = getattr(_thread, "is_building", False)
    _thread.is_building = True
    try:
        yield
    finally:
        _thread.is_building = before


def _is_outside() -> bool:
    """Whether this code runs outside of `strategy.run`."""
    return (
        getattr(_thread, "is_building", False)
        or not tf.distribute.has_strategy()
        or tf.distribute.in_cross_replica_context()
    )


class Sharded(keras.Variable):
    """A variable of which each replica holds a shard; made by `shard_of`.

    Attributes:
      layout: How it is split, a `tf_xshard.distribute.shards.Layout`.
      store: Reads and writes it whole.
      whole: For a shard of a weight, the weight. None for a slot variable.
    """

    layout: Any
    store: Store
    whole: Any = None

    @property
    def shards(self) -> tf.Variable:
        """The TensorFlow variable whose copies are the shards."""
        return self._value

    @property
    def value(self) -> Any:
        """This replica's shard, or outside of `strategy.run` the whole."""
        if not self._is_whole():
            return self._value
        if self.whole is None:
            return self.store.read(self)
        return getattr(self.whole, "value", self.whole)

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of `value`."""
        if self._is_whole():
            return tf.TensorShape(self.layout.shape)
        return tf.TensorShape([self.layout.size])

    def _is_whole(self) -> bool:
        return _is_outside() and not self.__dict__.get("_is_reference")

    @property
    def ndim(self) -> int:
        """The rank of `value`."""
        return len(self.shape)

    def numpy(self) -> np.ndarray:
        """The value as an array."""
        return np.asarray(self.value)

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return np.asarray(self.value, dtype)

    def _direct_assign(self, value: Any) -> None:
        if _is_outside():
            self.store.write(self, value)
        else:
            super()._direct_assign(value)

    @property
    def _shared_name(self) -> str:
        return self._value._shared_name

    def _serialize_to_tensors(self) -> dict:
        return {_KEY: self.store.read(self)}

    def _restore_from_tensors(self, restored_tensors: dict) -> Any:
        self.assign(restored_tensors[_KEY])
        return self._value


def shard_of(
    variable: keras.Variable, whole: Any, layout: Any, store: Store
) -> Sharded:
    """Makes a new variable the shards of a weight.

    Args:
      variable: A variable of shape [layout.size]; it gets the weight's path.
      whole: The weight, a Keras or TensorFlow variable.
      layout: How it is split.
      store: Reads and writes such variables whole.

    Returns:
      The variable.
    """
    # Slots are named after it, whatever scope this is in.
    path = getattr(whole, "path", None) or whole.name.replace(":", "_")
    variable.__dict__.update(_path=path, _name=path.split("/")[-1])
    return _converted(variable, layout, store, whole)


def _converted(
    variable: Any, layout: Any, store: Store, whole: Any = None
) -> Sharded:
    variable.__class__ = Sharded
    variable.__dict__.update(layout=layout, store=store, whole=whole)
    return variable


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
        """Creates a slot variable: see Keras.

        Args:
          reference_variable: A variable, or the shards of one.
          name: The slot's name.
          initializer: Its initializer.

        Returns:
          A variable; sharded if the reference is.
        """
        add = super().add_variable_from_reference
        if not isinstance(reference_variable, Sharded):
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
            slot = _converted(variable, reference.layout, reference.store)
            initializer = keras.initializers.get(initializer)
            if not isinstance(initializer, keras.initializers.Zeros):
                slot.assign(initializer(slot.layout.shape, slot.dtype))
        super()._track_variable(variable)

    def assign(self, variable: Any, value: Any) -> None:
        """Assigns a value: while it is built, on all replicas.

        Args:
          variable: A variable.
          value: A value of its shape.
        """
        copies = getattr(getattr(variable, "value", None), "values", None)
        if isinstance(variable, Sharded) and _is_outside():
            variable.assign(value)
        elif getattr(_thread, "is_building", False) and copies:
            for copy in copies:
                copy.assign(tf.cast(value, copy.dtype))
        else:
            super().assign(variable, value)

    def _var_key(self, variable: Any) -> Any:
        if isinstance(variable, Sharded):
            variable = variable.whole
        return super()._var_key(variable)

    def _clip_gradients(self, grads: Sequence) -> Sequence:
        clip = self.__dict__.get("_clip_shards")
        if clip is None:
            return super()._clip_gradients(grads)
        return clip(self, grads)


def _of_wholes(variables: Sequence) -> Sequence:
    """Weights in place of their shards, in a list that can be tracked."""
    if not any(isinstance(one, Sharded) for one in variables):
        return variables
    tracked = tf.Module()
    tracked.wholes = [
        one.whole if isinstance(one, Sharded) else one for one in variables
    ]
    return tracked.wholes


def clip_with(optimizer: keras.optimizers.Optimizer, clip: Callable) -> None:
    """Replaces how an optimizer clips the gradients of shards.

    Args:
      optimizer: One that is made local.
      clip: A function of the optimizer and a list of tensors.
    """
    optimizer.__dict__["_clip_shards"] = clip


@contextlib.contextmanager
def changes_when_chosen(
    optimizer: keras.optimizers.Optimizer, change: Callable
) -> Iterator[None]:
    """A context in which an optimizer is built, and MultiOptimizer may choose.

    Its function is called with weights, not with their shards.

    Args:
      optimizer: A MultiOptimizer; nothing happens for others.
      change: Called with each optimizer that it chooses, before it is built.

    Yields:
      None.
    """
    chosen = getattr(optimizer, "_optimizer_map", None)
    if chosen is None:
        yield
        return

    def choose(variable: Any) -> Any:
        if isinstance(variable, Sharded):
            variable = variable.whole
        result = chosen(variable)
        change(result)
        return result

    object.__setattr__(optimizer, "_optimizer_map", choose)
    try:
        yield
    finally:
        object.__setattr__(optimizer, "_optimizer_map", chosen)
