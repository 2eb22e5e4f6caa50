"""Defines Keras variables that are divided among replicas.

Inside `strategy.run`, a `Sharded` variable is this replica's shard, which
Keras's optimizers update like any other variable. An `Owned` variable is whole
on one replica of a group, and is not updated on the others.

Outside `strategy.run`, both have the whole shape and value, including when they
are saved and assigned. Files and checkpoints therefore do not show the split.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tf_xshard.private import names

# Present in Keras 3.12 to 3.16.
NAMES = names.PrivateNames(
    "CrossShardOptimizer(shard_update=True)",
    {
        # The write behind every assign of a Keras variable.
        "assign": "keras.Variable._direct_assign",
        # tf.train.Checkpoint calls these methods to write and read.
        "serialize": "keras.Variable._serialize_to_tensors",
        "restore": "keras.Variable._restore_from_tensors",
        "shared_name": "keras.Variable._shared_name",
    },
)
# These attributes hold a variable's TensorFlow variable, its path and its name.
names.attributes(NAMES.feature, "_value", "_path", "_name")
_KEY = "VARIABLE_VALUE"


class Store(Protocol):
    """Reads and writes whole variables, outside `strategy.run`."""

    def read(self, slot: Sharded) -> tf.Tensor:
        """Returns the value in the group of this process's first replica."""

    def write(self, slot: Sharded, value: tf.Tensor) -> None:
        """Writes a whole value to all replicas of this process."""

    def write_into(self, slot: Sharded, variable: Any) -> None:
        """Writes each replica's whole value to its copy of a variable."""


class _Thread(threading.local):
    """Holds what Keras's calls of optimizers and variables do not pass on."""

    # True while an optimizer is built for all replicas at once.
    is_building = False
    # This replica's position in its group; a tensor if only the device knows.
    position: Any = None
    # True in code that runs only on the owner of a variable.
    is_held = False
    # The variables whose gradients an optimizer clips.
    variables: Any = None


_thread = _Thread()


@contextlib.contextmanager
def _setting(owner: Any, **values: Any) -> Iterator[None]:
    """Sets attributes in this context; Keras and TensorFlow do not notice."""
    before = {name: getattr(owner, name) for name in values}
    owner.__dict__.update(values)
    try:
        yield
    finally:
        owner.__dict__.update(before)


def building() -> contextlib.AbstractContextManager[None]:
    """Marks code that builds an optimizer for all replicas at once.

    The first step may build an optimizer inside `strategy.run`.
    """
    return _setting(_thread, is_building=True)


def is_outside() -> bool:
    """Returns True outside of `strategy.run` and in a `building` context."""
    return (
        _thread.is_building
        or not tf.distribute.has_strategy()
        or tf.distribute.in_cross_replica_context()
    )


class Sharded(keras.Variable):
    """Splits a variable over replicas; `weight_of` or `converted` makes it.

    `layout` is a `tf_xshard.distribute.shards.Layout`. `whole` is the weight
    for the shards of a weight, and None for a slot variable.
    """

    layout: Any
    store: Store
    whole: Any = None
    # True while slot variables are created from this shard's shape. A slot
    # variable then never takes more memory than a shard.
    is_reference = False

    @property
    def shards(self) -> tf.Variable:
        """The TensorFlow variable whose copies are the shards."""
        return self._value

    @property
    def value(self) -> Any:
        """This replica's shard; outside of `strategy.run`, the whole value."""
        return self._read() if self._is_whole() else self._value

    def _read(self) -> Any:
        """Returns the whole value."""
        if self.whole is None:
            return self.store.read(self)
        is_of_keras = isinstance(self.whole, keras.Variable)
        return self.whole.value if is_of_keras else self.whole

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of `value`."""
        if self._is_whole():
            return tf.TensorShape(self.layout.shape)
        return tf.TensorShape([self.layout.size])

    def _is_whole(self) -> bool:
        return is_outside() and not self.is_reference

    @property
    def ndim(self) -> int:
        """The rank of `value`."""
        return len(self.shape)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        # Reading the value makes a copy.
        del copy
        return np.asarray(self.value, dtype)

    def _direct_assign(self, value: Any) -> None:
        if is_outside():
            self.store.write(self, value)
        else:
            super()._direct_assign(value)

    @property
    def _shared_name(self) -> str:
        return self._value._shared_name

    def _serialize_to_tensors(self) -> dict:
        return {_KEY: self._read()}

    def _restore_from_tensors(self, restored_tensors: dict) -> Any:
        self.assign(restored_tensors[_KEY])
        return self._value


class Owned(Sharded):
    """Lets one replica of a group hold a variable; `owned` makes it.

    `layout` is a `tf_xshard.distribute.ownership.Owned`. The value of a slot
    variable is a part of a block, which `bind` sets. The value of a weight is
    the weight itself.
    """

    # A slot variable's value before `bind`; None for zeros.
    _first: Any = None
    _is_bound = False

    def bind(self, block: tf.Variable, offset: int) -> None:
        """Moves the value into a block of all replicas."""
        layout = dataclasses.replace(self.layout, offset=offset)
        self.__dict__.update(_value=block, layout=layout, _is_bound=True)
        if self._first is not None:
            self.store.write(self, self._first)
            self.__dict__["_first"] = None

    @property
    def value(self) -> Any:
        """The value on the owner, and zeros on other replicas of the group."""
        is_whole = self.whole is not None or self._is_whole()
        return self._read() if is_whole else self._own()

    def _read(self) -> Any:
        if self.whole is not None or self._is_bound:
            return super()._read()
        if self._first is None:
            return tf.zeros(self.layout.shape, self.dtype)
        return tf.constant(self._first, self.dtype)

    def _own(self) -> tf.Tensor:
        if is_elsewhere(self):
            return tf.zeros([], self.dtype)
        block = tf.raw_ops.ReadVariableOp(
            resource=self._value.handle, dtype=self._value.dtype
        )
        own = tf.reshape(self.layout.held(block), self.layout.shape)
        if tf.is_tensor(_thread.position) and not _thread.is_held:
            is_owner = tf.equal(_thread.position, self.layout.owner)
            own = tf.where(is_owner, own, tf.zeros_like(own))
        return own

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the whole value."""
        if self.is_reference:
            return tf.TensorShape([0])  # The block holds the numbers.
        return tf.TensorShape(self.layout.shape)

    def assign(self, value: Any) -> Any:
        """Assigns a value, on the owner only."""
        # Elsewhere, the shape of `value` may be that of a scalar zero.
        return value if is_elsewhere(self) else super().assign(value)

    def _direct_assign(self, value: Any) -> None:
        if not is_outside():
            when_held(self, lambda: self._assign_own(value))
        elif self.whole is not None:
            self.whole.assign(value)
        elif self._is_bound:
            self.store.write(self, value)
        else:
            self.__dict__["_first"] = np.asarray(value)

    def _assign_own(self, value: Any) -> None:
        variable = self.value if self.whole is not None else self._value
        value = tf.cast(value, variable.dtype)
        if self.whole is None:
            block = tf.raw_ops.ReadVariableOp(
                resource=variable.handle, dtype=variable.dtype
            )
            value = self.layout.placed(block, value)
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)

    @property
    def _shared_name(self) -> str:
        # Several slot variables may be in one block.
        return self._path


def at(position: int | tf.Tensor) -> contextlib.AbstractContextManager[None]:
    """Tells `Owned` variables this replica's position in its group."""
    return _setting(_thread, position=position)


def is_elsewhere(variable: Any) -> bool:
    """Returns True if another replica surely owns a variable."""
    return (
        isinstance(variable, Owned)
        and isinstance(_thread.position, int)
        and _thread.position != variable.layout.owner
        and not is_outside()
    )


def when_held(variable: Any, function: Callable[[], Any]) -> None:
    """Calls a function, but not where another replica owns the variable."""
    if is_elsewhere(variable):
        return
    position = _thread.position
    if (
        not isinstance(variable, Owned)
        or not tf.is_tensor(position)
        or _thread.is_held
    ):
        function()
        return

    def on_owner() -> tf.Tensor:
        with _setting(_thread, is_held=True):
            function()
        return tf.constant(True)

    # One program for all replicas, as on TPUs, finds out when it runs.
    tf.cond(
        tf.equal(position, variable.layout.owner),
        on_owner,
        lambda: tf.constant(False),
    )


def owned(variable: keras.Variable, layout: Any, store: Store) -> Owned:
    """Makes a slot variable `Owned`, with its value."""
    values = getattr(variable.value, "values", (variable.value,))
    first = np.asarray(values[0])
    slot = converted(variable, layout, store, kind=Owned)
    slot.__dict__["_first"] = first if first.any() else None
    return slot


def weight_of(
    variable: keras.Variable,
    whole: Any,
    layout: Any,
    store: Store,
    kind: type = Sharded,
) -> Any:
    """Makes a new variable stand for a weight, while the weight is updated.

    `variable` has the shape [layout.size] for the shards of the weight.
    """
    # The variable gets the weight's path, after which slots are named in any
    # scope.
    path = getattr(whole, "path", None) or whole.name.replace(":", "_")
    variable.__dict__.update(_path=path, _name=path.split("/")[-1])
    return converted(variable, layout, store, whole, kind)


def converted(
    variable: Any,
    layout: Any,
    store: Store,
    whole: Any = None,
    kind: type = Sharded,
) -> Any:
    """Changes a variable's class; a slot variable has no `whole`."""
    variable.__class__ = kind
    variable.__dict__.update(layout=layout, store=store, whole=whole)
    return variable


def weight(variable: Any) -> Any:
    """Returns the weight that a variable stands for; other variables as is."""
    stands = isinstance(variable, Sharded) and variable.whole is not None
    return variable.whole if stands else variable


_OPTIMIZER = "keras.optimizers.Optimizer."
# Present in Keras 3.12 to 3.16.
UPDATES = names.PrivateNames(
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
        # Clips the gradients of its arguments and updates the variables.
        "apply_gradients": _OPTIMIZER + "_backend_apply_gradients",
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
        if name == "_trainable_variables" and any(
            isinstance(one, Sharded) for one in trackable
        ):
            # A module makes a list that can be tracked.
            module = tf.Module()
            module.weights = [weight(one) for one in trackable]
            trackable = module.weights
        return super()._track_trackable(trackable, name, overwrite)


class UpdatesShards(TracksWholes):
    """An optimizer that can be built with `Sharded` variables.

    Its slot variables are then also sharded. A weight and its shards have the
    same key.
    """

    # The reference variable and the initializer of the slot variable that is
    # being created.
    _slot_of: tuple[Any, Any] = (None, None)

    def add_variable_from_reference(
        self,
        reference_variable: Any,
        name: str | None = None,
        initializer: Any = "zeros",
    ) -> Any:
        """Creates a slot variable, sharded like its reference variable."""
        add = super().add_variable_from_reference
        if not isinstance(reference_variable, Sharded):
            return add(reference_variable, name=name, initializer=initializer)
        with (
            _setting(self, _slot_of=(reference_variable, initializer)),
            _setting(reference_variable, is_reference=True),
        ):
            return add(reference_variable, name=name)

    def _track_variable(self, variable: Any) -> None:
        reference, initializer = self._slot_of
        if reference is not None:
            # Convert the variable before Keras assigns a checkpoint's value.
            slot = converted(
                variable,
                reference.layout,
                reference.store,
                kind=type(reference),
            )
            initializer = keras.initializers.get(initializer)
            if not isinstance(initializer, keras.initializers.Zeros):
                slot.assign(initializer(slot.layout.shape, slot.dtype))
        super()._track_variable(variable)

    def assign(self, variable: Any, value: Any) -> None:
        """Assigns a value; on all replicas while the optimizer is built."""
        copies = getattr(getattr(variable, "value", None), "values", None)
        if isinstance(variable, Owned) or (
            isinstance(variable, Sharded) and is_outside()
        ):
            variable.assign(value)
        elif _thread.is_building and copies:
            for copy in copies:
                copy.assign(tf.cast(value, copy.dtype))
        else:
            super().assign(variable, value)

    def assign_add(self, variable: Any, value: Any) -> None:
        """Adds to a variable; of an `Owned` variable, on its owner only."""
        if isinstance(variable, Owned):
            variable.assign_add(value)
        else:
            super().assign_add(variable, value)

    def assign_sub(self, variable: Any, value: Any) -> None:
        """Subtracts from a variable; see `assign_add`."""
        if isinstance(variable, Owned):
            variable.assign_sub(value)
        else:
            super().assign_sub(variable, value)

    def _backend_apply_gradients(
        self, grads: Sequence, trainable_variables: Sequence
    ) -> Any:
        with _setting(_thread, variables=list(trainable_variables)):
            return super()._backend_apply_gradients(grads, trainable_variables)

    def _backend_update_step(
        self, grads: Sequence, trainable_variables: Sequence, learning_rate: Any
    ) -> Any:
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            step = functools.partial(
                self.update_step, gradient, variable, learning_rate
            )
            when_held(variable, step)

    def _var_key(self, variable: Any) -> Any:
        return super()._var_key(weight(variable))

    def _clip_gradients(self, grads: Sequence) -> Sequence:
        clip = self.__dict__.get("_clip_shards")
        if clip is None:
            return super()._clip_gradients(grads)
        return clip(self, grads, _thread.variables)


def clip_with(optimizer: keras.optimizers.Optimizer, clip: Callable) -> None:
    """Replaces how an optimizer clips the gradients of shards."""
    optimizer.__dict__["_clip_shards"] = clip


@contextlib.contextmanager
def choosing(
    optimizers: Iterable, change: Callable[[Any, Any], None]
) -> Iterator[None]:
    """Makes MultiOptimizers call their functions once for each weight.

    Such a function may create optimizers. Calls `change` with the
    MultiOptimizer and each of them, before the MultiOptimizer builds it.
    """
    with contextlib.ExitStack() as undo:
        for one in optimizers:
            given = getattr(one, "_optimizer_map", None)
            if given is not None:
                undo.callback(object.__setattr__, one, "_optimizer_map", given)
                once = _once_for_each(
                    given, one._var_key, functools.partial(change, one)
                )
                object.__setattr__(one, "_optimizer_map", once)
        yield


def _once_for_each(
    choose: Callable, key: Callable, change: Callable[[Any], None]
) -> Callable:
    leaves: dict = {}

    def chosen_once(variable: Any) -> Any:
        if key(variable) not in leaves:
            # The MultiOptimizer's function knows weights, not their shards.
            leaves[key(variable)] = choose(weight(variable))
            change(leaves[key(variable)])
        return leaves[key(variable)]

    return chosen_once


def chosen(optimizer: Any, variables: Sequence) -> list:
    """Returns each weight's optimizer, before `build` in `choosing`."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    choose = getattr(optimizer, "_optimizer_map", lambda variable: optimizer)
    return [choose(one) for one in variables]


def slots_by_variable(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[tuple[Any, keras.Variable]]:
    """Yields pairs of a variable and its slot variable that is not a scalar.

    Finds the slot variables in lists with one element for each variable, in
    which Keras's optimizers keep them.
    """
    variables = optimizer._trainable_variables or []
    for name, value in vars(optimizer).items():
        if (
            name not in ("_trainable_variables", "_variables")
            and isinstance(value, list)
            and len(value) == len(variables)
        ):
            for variable, slot in zip(variables, value, strict=True):
                if isinstance(slot, keras.Variable) and len(slot.shape):
                    yield variable, slot
