"""Raises TypeError if an inner optimizer reduces gradients across replicas.

The gradients that the inner optimizer gets are already reduced. Inspecting its
code would miss a reduction in a helper function. So the optimizer runs in a
replica context that behaves like TensorFlow's, but raises on a reduction.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.distribute import site as site_lib
from tf_xshard.private.keras import wrapper_calls

_do_not_convert = tf.autograph.experimental.do_not_convert
# TensorFlow and Keras use merge_call for variables, such as assigning a
# variable that all replicas share.
_OF_TENSORFLOW = ("tensorflow.", "keras.src.")


class _Guard:
    """Overrides methods of a replica context, to raise on a reduction.

    `culprit` is the optimizer, and `lifted_sums` are the sums that tf_xshard
    has made meanwhile. `base` is TensorFlow's class of the context.
    """

    culprit: Any
    lifted_sums: set[str]
    base: Any

    @_do_not_convert
    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError."""
        _refuse(self.culprit, "all_reduce")

    @_do_not_convert
    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError."""
        _refuse(self.culprit, "all_gather")

    @_do_not_convert
    def merge_call(
        self, merge_fn: Callable, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls TensorFlow's merge_call, in which users can't reduce."""
        if not str(getattr(merge_fn, "__module__", "")).startswith(
            _OF_TENSORFLOW
        ):
            merge_fn = _guarded_function(merge_fn, self.culprit)
        with lifted():
            context: Any = tf.distribute.get_replica_context()
            return context.merge_call(merge_fn, args=args, kwargs=kwargs)


class _Refusing:
    """Replaces a strategy and its `extended`, to raise on a reduction."""

    def __init__(self, replaced: Any, culprit: Any) -> None:
        self._replaced = replaced
        self._culprit = culprit

    def __getattr__(self, name: str) -> Any:
        if name in ("reduce", "gather", "reduce_to", "batch_reduce_to"):
            return lambda *args, **kwargs: _refuse(self._culprit, name)
        value = getattr(self._replaced, name)
        return _Refusing(value, self._culprit) if name == "extended" else value


def _guarded_function(merge_fn: Callable, culprit: Any) -> Callable:
    @functools.wraps(merge_fn)
    def call(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        return merge_fn(_Refusing(strategy, culprit), *args, **kwargs)

    return call


def _refuse(culprit: Any, what: str) -> None:
    name = type(culprit).__name__
    advice = f"Remove the call from {name}."
    if unknown := _unknown_optimizers(culprit):
        advice = (
            f"{unknown[0]} is an optimizer that tf_xshard does not find, and"
            " that may make this call. Rename the attribute to inner_optimizer."
        )
    raise TypeError(
        f"{name} calls {what}(). The gradients of an inner optimizer are"
        f" reduced across replicas already and would be reduced twice. {advice}"
    )


def _unknown_optimizers(optimizer: Any) -> list[str]:
    """Returns attributes that hold optimizers, except `inner_optimizer`."""
    found = []
    for name, value in vars(optimizer).items():
        if not isinstance(value, keras.optimizers.Optimizer):
            continue
        if name == "inner_optimizer":
            found += _unknown_optimizers(value)
        else:
            found.append(f"{type(optimizer).__name__}.{name}")
    return found


@functools.cache
def _guarded_class(base: Any) -> type:
    return type(f"Guarded{base.__name__}", (_Guard, base), {"base": base})


@contextlib.contextmanager
def guarded(optimizer: Any) -> Iterator[None]:
    """Makes an optimizer raise if it reduces while a wrapper calls it."""
    current: Any = tf.distribute.get_replica_context()
    with wrapper_calls.inside():
        if current is None or current.strategy.num_replicas_in_sync == 1:
            yield
            return
        base: Any = getattr(current, "base", type(current))
        guard: Any = _guarded_class(base)(
            current.strategy, _replica_id(current)
        )
        guard.culprit = optimizer
        guard.lifted_sums = set()
        before = _sums()
        with guard:
            yield
        if _sums() - before - guard.lifted_sums:
            _refuse(guard.culprit, "CrossReplicaSum")


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Lets code of this package reduce inside a `guarded` context."""
    current: Any = tf.distribute.get_replica_context()
    base = getattr(current, "base", None)
    if base is None:
        yield
        return
    before = _sums()
    # Enter a new context. If TensorFlow's own context were entered again, it
    # would forget the state to which it returns.
    with base(current.strategy, _replica_id(current)):
        yield
    current.lifted_sums |= _sums() - before


def _sums() -> set[str]:
    """Returns the names of the current graph's sums across a TPU's replicas.

    Under other strategies, replicas share a graph, which does not tell which
    replica made a sum. Sums in a branch, such as a LossScaleOptimizer's, are
    not found.
    """
    strategy = tf.distribute.get_strategy()
    if tf.executing_eagerly() or site_lib.kind_of(strategy) != "tpu":
        return set()
    return {
        operation.name
        for operation in tf.compat.v1.get_default_graph().get_operations()
        if operation.type == "CrossReplicaSum"
    }


def _replica_id(context: tf.distribute.ReplicaContext) -> Any:
    """Returns an int, or a scalar tensor if it is only known at run time."""
    value = tf.get_static_value(context.replica_id_in_sync_group)
    return context.replica_id_in_sync_group if value is None else int(value)
