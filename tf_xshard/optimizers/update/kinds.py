"""Tells which optimizers may update shards, and which need whole variables."""

from __future__ import annotations

import math
import types
from typing import Any, TypeVar

import keras

from tf_xshard.optimizers import stack
from tf_xshard.private.keras import optimizer_state

_Class = TypeVar("_Class", bound=type)
_ELEMENTWISE_MARK = "is_tf_xshard_elementwise"
_PER_VARIABLE_MARK = "is_tf_xshard_per_variable"
_KERAS = keras.optimizers
# In these optimizers, each element of a variable and of its slot variables
# depends only on the same element of the gradient.
_ELEMENTWISE = tuple(
    getattr(_KERAS, name)
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "Adamax",
        "Nadam",
        "Adagrad",
        "Adadelta",
        "RMSprop",
        "Ftrl",
        "Lion",
        "ScheduleFreeAdamW",
    )
    if hasattr(_KERAS, name)
)
# These pass gradients to other optimizers, which are checked separately.
_CONTAINERS = tuple(
    getattr(_KERAS, name)
    for name in ("LossScaleOptimizer", "MultiOptimizer")
    if hasattr(_KERAS, name)
)
# In these optimizers, a variable and its slot variables depend only on the
# variable's own whole gradient.
_PER_VARIABLE = (_KERAS.Lamb, _KERAS.Adafactor)
_MUON = getattr(_KERAS, "Muon", None)
# Muon takes as long for this many operations as Lamb for an element: 370 to 810
# with matrices of 256 to 1024 rows, on 2 cores of an x86-64 server.
_FLOPS_PER_ELEMENT = 500


def elementwise(optimizer_class: _Class) -> _Class:
    """Declares that an optimizer computes element by element.

    `CrossShardOptimizer(..., shard_update=True)` passes shards to its inner
    optimizer. A shard is a tensor of rank 1 with some of a variable's elements.
    tf_xshard knows which optimizers of Keras compute the same on shards. For
    your own class, `shard_update=True` raises ValueError until this decorator
    declares the class.

    Declare a class if each element of a variable and its slot variables depends
    only on the same element of the gradient and on scalars. It must not depend
    on a norm, mean, shape or random number of a whole tensor. Create slot
    variables with `add_variable_from_reference` or `add_optimizer_variables`.
    If a slot variable starts with the variable's value, set it in `build` with
    `self.assign`.

    Args:
      optimizer_class: A class of Keras optimizers. A declaration does not cover
        subclasses; declare each one.

    Returns:
      The class.

    Raises:
      TypeError: If `optimizer_class` is not a class of Keras optimizers.

    See also `tf_xshard.per_variable`, for classes that need whole variables.

    Example:

    >>> @tf_xshard.elementwise
    ... class SignDescent(keras.optimizers.SGD):
    ...     def update_step(self, gradient, variable, learning_rate):
    ...         self.assign_sub(variable, learning_rate * tf.sign(gradient))
    >>> optimizer = tf_xshard.CrossShardOptimizer(SignDescent(0.1),
    ...                                           shard_update=True)

    Source: Xu et al., "Automatic Cross-Replica Sharding of Weight Update in
    Data-Parallel Training", arXiv 2004.13336.
    """
    _mark("elementwise", optimizer_class, _ELEMENTWISE_MARK)
    return optimizer_class


def per_variable(optimizer_class: _Class) -> _Class:
    """Declares that an optimizer updates each variable separately.

    `CrossShardOptimizer(..., shard_update=True)` then lets one replica of a
    group update a variable, and hold its slot variables. The others get the new
    weight. tf_xshard knows which optimizers of Keras do this. For your own
    class, `shard_update=True` raises ValueError until this decorator or
    `tf_xshard.elementwise` declares the class.

    Declare a class if the update of a variable depends only on the variable,
    its gradient, its slot variables and scalars, such as the number of steps.
    It may use norms, means and shapes of the whole variable. It must not use
    other variables or random numbers. `update_step` must not change other
    state. Create slot variables with `add_variable_from_reference` or
    `add_optimizer_variables`. Slot variables of other shapes must be elements
    of a list with one element for each variable.

    Args:
      optimizer_class: A class of Keras optimizers. A declaration does not cover
        subclasses; declare each one.

    Returns:
      The class.

    Raises:
      TypeError: If `optimizer_class` is not a class of Keras optimizers.

    Example:

    >>> @tf_xshard.per_variable
    ... class NormalizedDescent(keras.optimizers.SGD):
    ...     def update_step(self, gradient, variable, learning_rate):
    ...         self.assign_sub(
    ...             variable, learning_rate * gradient / tf.norm(gradient))
    >>> optimizer = tf_xshard.CrossShardOptimizer(NormalizedDescent(0.1),
    ...                                           shard_update=True)

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
    Trillion Parameter Models", arXiv 1910.02054, with whole variables as in Ahn
    et al., "Dion: Distributed Orthonormalized Updates", arXiv 2504.05295.
    """
    _mark("per_variable", optimizer_class, _PER_VARIABLE_MARK)
    return optimizer_class


def _mark(decorator: str, optimizer_class: Any, mark: str) -> None:
    if not isinstance(optimizer_class, type) or not issubclass(
        optimizer_class, keras.optimizers.Optimizer
    ):
        raise TypeError(
            f"{decorator} takes a class of Keras optimizers, got"
            f" {optimizer_class!r}."
        )
    setattr(optimizer_class, mark, True)


def cost_of_owner(
    optimizer: keras.optimizers.Optimizer, shape: tuple[int, ...], path: str
) -> float | None:
    """Returns the cost of updating a whole variable, or None to split it.

    The unit is the update of one element by Lamb.
    """
    kind: type = optimizer.__class__
    size = float(max(1, math.prod(shape)))
    if _MUON is None or kind is not _MUON:
        is_owned = kind in _PER_VARIABLE or _PER_VARIABLE_MARK in vars(kind)
        return size if is_owned else None
    variable = types.SimpleNamespace(shape=shape, path=path)
    if optimizer_state.MUON.uses_adamw(optimizer, variable):
        return None
    # Each step of the iteration multiplies three pairs of matrices.
    small, large = sorted(shape[-2:])
    flops = 2 * small * small * (2 * large + small) * optimizer.ns_steps
    return size * (1 + flops / (small * large) / _FLOPS_PER_ELEMENT)


def check(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ValueError if an optimizer can't update shards."""
    for one in stack.descendants(optimizer):
        # A local optimizer's type is a subclass of its `__class__`, the class
        # that users know.
        of: type = one.__class__
        if stack.is_wrapper(one):
            raise ValueError(
                f"shard_update=True: {of.__name__} can't be inside, since it"
                " needs whole gradients and variables. Give shard_update to the"
                " innermost CrossShardOptimizer, as in TowerOptimizer("
                "CrossShardOptimizer(Adam(), shard_update=True), 4). (An"
                " AGNOptimizer trains different variables on each replica,"
                " which can't be sharded.)"
            )
        known = (*_ELEMENTWISE, *_PER_VARIABLE, _MUON, *_CONTAINERS)
        marks = (_ELEMENTWISE_MARK, _PER_VARIABLE_MARK)
        if of in known or any(mark in vars(of) for mark in marks):
            continue
        raise ValueError(
            "shard_update=True: tf_xshard does not know how"
            f" {of.__name__} updates variables. If each element depends only"
            " on the same element of the gradient, declare it:"
            f" tf_xshard.elementwise({of.__name__}). If a variable depends"
            " only on its own whole gradient:"
            f" tf_xshard.per_variable({of.__name__})."
        )
