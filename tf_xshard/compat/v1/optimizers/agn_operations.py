"""AGNOptimizer's operations, on ref and on resource variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.compat.v1.optimizers import agn_custom_getter
from tf_xshard.distribute import indexed_slices

_GLOBAL = tf.compat.v1.GraphKeys.GLOBAL_VARIABLES
_LOCAL = tf.compat.v1.GraphKeys.LOCAL_VARIABLES


class Operations:
    """Assignments to AGNOptimizer's variables, with or without locks."""

    def __init__(self, use_locking: bool) -> None:
        self._locked = use_locking

    def accumulate(
        self,
        gradient: tf.Tensor | tf.IndexedSlices,
        copies: agn_custom_getter.Copies,
    ) -> Any:
        """Adds a gradient, of the variable's shape, to the accumulator."""
        if isinstance(gradient, tf.IndexedSlices):
            gradient = indexed_slices.dense(gradient, copies.accumulator)
        return tf.compat.v1.assign_add(
            copies.accumulator, gradient, use_locking=self._locked
        )

    def start_from_center(
        self, copies: agn_custom_getter.Copies
    ) -> tuple[Any, Any]:
        """Copies the center to the local variable; zeroes the accumulator."""
        return (
            self._assign(copies.local, read(copies.center)),
            self._assign(
                copies.accumulator, tf.zeros_like(read(copies.accumulator))
            ),
        )

    def increment(self, variable: tf.Variable) -> Any:
        """Adds one to a scalar variable."""
        with tf.compat.v1.colocate_with(variable):
            return tf.compat.v1.assign_add(
                variable,
                tf.constant(1, variable.dtype.base_dtype),
                use_locking=self._locked,
            )

    def _assign(self, variable: tf.Variable, value: tf.Tensor) -> Any:
        return tf.compat.v1.assign(variable, value, use_locking=self._locked)


def read(variable: tf.Variable) -> tf.Tensor:
    """Reads a variable's current value, of the variable's shape."""
    return tf.identity(variable.read_value())


def creating_local_variables() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which new variables are local to the worker."""

    def creator(
        next_creator: Callable[..., tf.Variable], **kwargs: Any
    ) -> tf.Variable:
        collections = kwargs.get("collections") or [_GLOBAL]
        kwargs["collections"] = [
            _LOCAL if name == _GLOBAL else name for name in collections
        ]
        return next_creator(**kwargs)

    return tf.variable_creator_scope(creator)


def cond(
    is_due: tf.Tensor,
    exchange: Callable[[], tf.Tensor],
    variables: Sequence[tf.Variable | None],
) -> tf.Tensor:
    """Calls `tf.cond`, in control flow v1 if a variable is a ref variable."""
    # Control flow v2 does not support ref variables.
    in_v2 = tf.compat.v1.control_flow_v2_enabled()
    of_refs = any(
        v is not None and v.dtype != v.dtype.base_dtype for v in variables
    )
    if in_v2 and of_refs:
        tf.compat.v1.disable_control_flow_v2()
    try:
        return tf.cond(is_due, exchange, lambda: tf.constant(False))
    finally:
        if in_v2 and of_refs:
            tf.compat.v1.enable_control_flow_v2()
