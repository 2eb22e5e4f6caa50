"""Creates, reads and writes variables with a separate value on each replica.

State that an optimizer creates with `make` differs by replica. TensorFlow shows
and saves the mean over the replicas, and restores this mean on all replicas. A
later reduction then computes the same sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard.private.keras import shards as keras_shards


def make(
    shape: Sequence[int],
    dtype: str,
    name: str,
    kind: type[keras.Variable] = keras.Variable,
) -> keras.Variable:
    """Creates a variable of zeros that each replica updates separately."""
    is_float = tf.as_dtype(dtype).is_floating
    return kind(
        tf.zeros(shape, dtype),
        dtype=dtype,
        trainable=False,
        autocast=False,
        # Integers are counters, which are equal on all replicas.
        aggregation="mean" if is_float else "only_first_replica",
        synchronization="on_read",
        name=name,
    )


def takes(dtype: str, saved: str) -> bool:
    """Returns True if a variable takes saved values of a dtype."""
    # Counters had 32 bits up to version 0.1.0.
    return saved == dtype or (saved, dtype) == ("int32", "int64")


def read(variable: Any) -> tf.Tensor:
    """Returns this replica's value."""
    return tf.raw_ops.ReadVariableOp(
        resource=_handle(variable), dtype=variable.dtype
    )


def assign(variable: Any, value: Any) -> None:
    """Sets this replica's value to a tensor of the variable's shape."""
    tf.raw_ops.AssignVariableOp(
        resource=_handle(variable), value=tf.cast(value, variable.dtype)
    )


def assign_all(targets: Sequence, sources: Sequence) -> None:
    """Assigns each target this replica's value of its source."""
    for target, source in zip(targets, sources, strict=True):
        assign(target, read(source))


def add(variable: Any, value: Any) -> None:
    """Adds a tensor of the same shape, or IndexedSlices, on this replica."""
    handle = _handle(variable)
    if isinstance(value, tf.IndexedSlices):
        tf.raw_ops.ResourceScatterAdd(
            resource=handle,
            indices=value.indices,
            updates=tf.cast(value.values, variable.dtype),
        )
        return
    tf.raw_ops.AssignAddVariableOp(
        resource=handle, value=tf.cast(value, variable.dtype)
    )


def accumulator_of(variable: Any, name: str) -> keras.Variable:
    """Creates zeros of a variable's shape, for sums of its gradients."""
    # Sums of a 16-bit variable's gradients are float32, to keep their digits.
    dtype = tf.as_dtype(variable.dtype)
    return make(
        variable.shape, "float32" if dtype.size < 4 else dtype.name, name
    )


def copy_of(variable: Any) -> keras.Variable:
    """Creates a variable with the same path, constraint and values."""
    # Optimizers may select variables by path (MultiOptimizer, weight decay).
    *scopes, name = path(variable).split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        result = keras.Variable(
            tf.zeros(variable.shape, variable.dtype),
            dtype=variable.dtype,
            trainable=False,
            autocast=False,
            name=name,
        )
    result.constraint = getattr(variable, "constraint", None)
    copy(variable, result, tf.distribute.get_strategy())
    return result


def copy(source: Any, target: Any, strategy: tf.distribute.Strategy) -> None:
    """Copies each replica's value of one variable to another variable."""
    if tf.distribute.in_cross_replica_context():
        strategy.extended.update(
            tensorflow_variable(target),
            lambda one, value: one.assign(value),
            args=(tensorflow_variable(source),),
        )
    else:
        assign(target, read(source))


def swap(one: Any, other: Any, strategy: tf.distribute.Strategy) -> None:
    """Swaps the values of two variables on each replica."""

    def exchange(variable: Any, second: Any) -> None:
        value = tf.identity(variable)
        variable.assign(second)
        second.assign(value)

    strategy.extended.update(
        tensorflow_variable(one), exchange, args=(tensorflow_variable(other),)
    )


def swap_here(one: Any, other: Any) -> None:
    """Swaps this replica's values of two variables."""
    values = read(one), read(other)
    for variable, value in zip((other, one), values, strict=True):
        assign(variable, value)


def cond(
    predicate: tf.Tensor,
    function: Callable[[], Any],
    otherwise: Callable[[], Any] = lambda: None,
) -> None:
    """Calls a function if a tensor is true, else the other one."""
    if tf.executing_eagerly():
        (function if predicate else otherwise)()
        return

    def calling(one: Callable[[], Any], result: bool) -> Callable:
        def call() -> tf.Tensor:
            one()
            return tf.constant(result)

        return call

    tf.cond(predicate, calling(function, True), calling(otherwise, False))


def flat_name(variable: Any) -> str:
    """Returns a variable's path as a flat name, for names of its state."""
    return path(variable).replace("/", "_")


def path(variable: Any) -> str:
    """Returns the path of a Keras or TensorFlow variable."""
    found = getattr(variable, "path", None) or variable.name.split(":")[0]
    return found.replace(":", "_")


def tensorflow_variable(variable: Any) -> Any:
    """Returns the TensorFlow variable of a Keras or TensorFlow variable."""
    if isinstance(variable, keras_shards.Sharded):
        return variable.shards
    return variable.value if isinstance(variable, keras.Variable) else variable


def key(variable: Any) -> int:
    """Returns one key for a Keras variable and its TensorFlow variable."""
    # Several owned slot variables may be parts of one TensorFlow variable.
    if isinstance(variable, keras_shards.Owned) and variable.whole is None:
        return id(variable)
    return id(tensorflow_variable(variable))


def _handle(variable: Any) -> tf.Tensor:
    # In replica context, a distributed variable has this replica's handle.
    return tensorflow_variable(variable).handle


def copies(variable: Any) -> tuple[tf.Variable, ...]:
    """Returns the copies of a variable on this process's replicas, in order.

    A variable that was created outside of any strategy's scope has one copy.
    """
    value = tensorflow_variable(variable)
    if isinstance(value, tf.distribute.DistributedValues):
        return tuple(value.values)
    return (value,)


def strategy_of(variable: Any) -> tf.distribute.Strategy | None:
    """Returns the strategy in whose scope a variable was created, or None."""
    value = tensorflow_variable(variable)
    return getattr(value, "distribute_strategy", None)


def may_differ(variables: Sequence) -> bool:
    """Returns True if replicas may hold different values of any variable.

    Does not read values of other processes, but assumes that they differ.
    """
    for variable in variables:
        if isinstance(variable, keras_shards.Sharded):
            continue  # Replicas hold different parts of one value.
        first, *others = copies(variable)
        strategy = strategy_of(variable)
        if strategy and 1 + len(others) < strategy.num_replicas_in_sync:
            return True
        first = np.asarray(first)
        if any(
            not np.array_equal(first, np.asarray(other), equal_nan=True)
            for other in others
        ):
            return True
    return False
