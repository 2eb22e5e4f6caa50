"""Lists optimizers that compute the same on a shard as on a whole variable."""

from __future__ import annotations

from typing import TypeVar

import keras

from tf_xshard.optimizers import stack

_Class = TypeVar("_Class", bound=type)
_MARK = "is_tf_xshard_elementwise"
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
_REASONS = {
    "Lamb": "it scales each update by the norm of the whole variable",
    "Adafactor": "it keeps means over the rows and columns of a variable",
    "Muon": "it orthogonalizes whole matrices",
}


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
    if not isinstance(optimizer_class, type) or not issubclass(
        optimizer_class, keras.optimizers.Optimizer
    ):
        raise TypeError(
            "elementwise() declares a class of Keras optimizers, got"
            f" {optimizer_class!r}."
        )
    setattr(optimizer_class, _MARK, True)
    return optimizer_class


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
        if of in _ELEMENTWISE + _CONTAINERS or _MARK in vars(of):
            continue
        if of.__name__ in _REASONS and of.__module__.startswith("keras."):
            raise ValueError(
                f"shard_update=True can't be used with {of.__name__}:"
                f" {_REASONS[of.__name__]}, and would see only a shard of it."
                " Leave shard_update out, or use AdamW, for example."
            )
        raise ValueError(
            f"shard_update=True: it is not known whether {of.__name__} computes"
            " the same on a shard as on a whole variable. If each element"
            " depends only on the same element of the gradient, declare it:"
            f" tf_xshard.elementwise({of.__name__})."
        )
