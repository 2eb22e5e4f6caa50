"""Checks of the arguments that every Keras wrapper of this package takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import site as site_lib
from tf_xshard.optimizers import tree
from tf_xshard.private import keras_optimizer_state
from tf_xshard.reduction import group_sum

LOSS_NORMALIZATIONS = ("global", "replica")
# Includes tf.compat.v1.losses.Reduction, which the original optimizer takes.
_REDUCTIONS = {
    "mean": "mean",
    "sum": "sum",
    tf.compat.v1.losses.Reduction.MEAN: "mean",
    tf.compat.v1.losses.Reduction.SUM: "sum",
}
# These act on the reduced gradient, which the inner optimizer gets.
_ARGUMENTS_OF_THE_INNER = (
    "learning_rate",
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)


def check(
    own_name: str,
    inner: Any,
    reduction: Any,
    loss_normalization: Any,
    kwargs: Mapping[str, Any],
) -> str:
    """Checks what every wrapper takes; changes nothing.

    Args:
      own_name: The name of the wrapper's class.
      inner: The inner optimizer given.
      reduction: The value given for this argument.
      loss_normalization: The value given for this argument.
      kwargs: The extra keyword arguments.

    Returns:
      The reduction, `"mean"` or `"sum"`.

    Raises:
      TypeError, ValueError: If an argument is invalid.
    """
    _refuse_unknown(own_name, kwargs)
    _check_inner_optimizer(own_name, inner)
    if loss_normalization not in (None, *LOSS_NORMALIZATIONS):
        raise ValueError(
            f"loss_normalization must be one of {LOSS_NORMALIZATIONS} or"
            f" None, got {loss_normalization!r}."
        )
    return _checked_reduction(reduction)


def check_same_scope(
    own_name: str,
    own: tf.distribute.Strategy,
    inner: keras.optimizers.Optimizer,
    what: str = "inner",
) -> None:
    """Checks that an optimizer was created under the wrapper's strategy.

    Args:
      own_name: The name of the wrapper's class.
      own: The strategy in whose scope the wrapper is created.
      inner: The optimizer given.
      what: What the wrapper calls it.

    Raises:
      ValueError: If it was not.
    """
    its = keras_optimizer_state.strategy_of(inner)
    if own is not its:
        where = "outside any strategy's scope"
        if not site_lib.is_default(own):
            where = f"in the scope of {type(own).__name__}"
        raise ValueError(
            f"{own_name} was created {where}, but its {what} optimizer"
            f" {inner.name!r} was created {site_lib.other_scope(its)}."
            " Create both inside the same `with strategy.scope():`."
        )


def refuse_partial_reduction(inner: keras.optimizers.Optimizer) -> None:
    """Checks that all or none of a MultiOptimizer's optimizers reduce.

    Args:
      inner: The inner optimizer of one that does not reduce by itself.

    Raises:
      ValueError: If only some do.
    """
    alone = tree.unreduced(inner)
    if alone and tree.wrappers(inner):
        raise ValueError(
            "Some of MultiOptimizer's optimizers reduce gradients over the"
            f" replicas and others do not: {[one.name for one in alone]}. Wrap"
            " each of them in a CrossShardOptimizer, or none."
        )


def _refuse_unknown(own_name: str, kwargs: Mapping[str, Any]) -> None:
    """Refuses unknown keywords, and those of the base class by name.

    Args:
      own_name: The name of the wrapper's class.
      kwargs: The extra keyword arguments.

    Raises:
      ValueError: For an argument that belongs on the inner optimizer.
      TypeError: For any other.
    """
    for argument in kwargs:
        if argument in _ARGUMENTS_OF_THE_INNER:
            raise ValueError(
                f"{own_name} does not take {argument!r}: set it on the inner"
                f" optimizer, {own_name}(keras.optimizers.SGD("
                f"{argument}=...)). It acts on the reduced gradient there."
            )
        raise TypeError(f"{own_name} got an unknown argument {argument!r}.")


def _check_inner_optimizer(own_name: str, inner: Any) -> None:
    """Checks that the inner optimizer is a Keras optimizer.

    Args:
      own_name: The name of the wrapper's class.
      inner: The value given.

    Raises:
      TypeError: If it is not.
    """
    if isinstance(inner, tf.compat.v1.train.Optimizer):
        raise TypeError(
            f"{own_name} wraps Keras optimizers, got the TF1 optimizer"
            f" {type(inner).__name__}. Use tf_xshard.compat.v1.{own_name} for"
            " it, or pass a Keras optimizer such as keras.optimizers.SGD(0.1)."
        )
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise TypeError(
            f"{own_name} wraps a keras.optimizers.Optimizer, got {inner!r}"
            f" ({type(inner).__name__}). Write {own_name}("
            "keras.optimizers.Adam(1e-3)), for example."
        )


def _checked_reduction(reduction: Any) -> str:
    """Converts a `reduction` argument to `"mean"` or `"sum"`.

    Args:
      reduction: The value given.

    Returns:
      `"mean"` or `"sum"`.

    Raises:
      ValueError: For anything else.
    """
    if not isinstance(reduction, str) or reduction not in _REDUCTIONS:
        raise ValueError(
            f'reduction must be "mean" or "sum", got {reduction!r}.'
        )
    return _REDUCTIONS[reduction]


def checked_reducer(
    group_assignment: Any, communication: Any, role: str = "explicit"
) -> group_sum.GroupReducer:
    """The reducer of an optimizer with these arguments.

    Args:
      group_assignment: The value given for this argument.
      communication: The value given for this argument.
      role: See `GroupReducer`.

    Returns:
      A `GroupReducer`.

    Raises:
      TypeError, ValueError: If an argument is invalid, or the groups do not
        fit the strategy in whose scope this is called.
    """
    if group_assignment is not None:
        group_assignment = group_assignment_lib.GroupAssignment(
            group_assignment
        )
    communication = communication_lib.checked(communication)
    reducer = group_sum.GroupReducer(group_assignment, communication, role)
    if tf.distribute.has_strategy():
        strategy = tf.distribute.get_strategy()
        reducer.groups(
            strategy.num_replicas_in_sync,
            f"the strategy {type(strategy).__name__}",
        )
        if communication.dtype == "int8" and (
            site_lib.kind_of(strategy) == "tpu"
        ):
            raise ValueError(
                'Communication(dtype="int8") can\'t be used under TPUStrategy,'
                ' whose collectives only add up. Use dtype="bfloat16".'
            )
    return reducer
