"""Checks the arguments that all of tf_xshard's Keras optimizers take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import checks
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import reductions
from tf_xshard import wire_formats
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.distribute import variable_role
from tf_xshard.private.keras import optimizer_state
from tf_xshard.reduction import reducer

LOSS_NORMALIZATIONS = ("global", "replica")
# These settings act on the reduced gradient, which the inner optimizer gets.
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
) -> reductions.Reduction:
    """Checks the common arguments, changes nothing, returns the reduction."""
    _refuse_unknown(own_name, kwargs)
    _check_inner_optimizer(own_name, inner)
    check_loss_normalization(loss_normalization)
    return reductions.checked(reduction)


def check_loss_normalization(value: Any) -> None:
    """Raises ValueError for an unknown `loss_normalization` argument."""
    if value not in (None, *LOSS_NORMALIZATIONS):
        raise ValueError(
            f"loss_normalization must be one of {LOSS_NORMALIZATIONS} or"
            f" None, got {value!r}."
        )


def check_same_scope(
    own_name: str,
    own: tf.distribute.Strategy,
    inner: keras.optimizers.Optimizer,
    what: str = "inner",
) -> None:
    """Checks that an optimizer was created under the wrapper's strategy."""
    its = optimizer_state.strategy_of(inner)
    if own is not its:
        where = "outside any strategy's scope"
        if not site_lib.is_default(own):
            where = f"in the scope of {type(own).__name__}"
        raise ValueError(
            f"{own_name} was created {where}, but its {what} optimizer"
            f" {inner.name!r} was created {site_lib.other_scope(its)}."
            " Create both inside the same `with strategy.scope():`."
        )


def _refuse_unknown(own_name: str, kwargs: Mapping[str, Any]) -> None:
    """Raises for unknown keywords, with a hint for the inner optimizer's."""
    for argument in kwargs:
        if argument in _ARGUMENTS_OF_THE_INNER:
            raise ValueError(
                f"{own_name} does not take {argument!r}: set it on the inner"
                f" optimizer, {own_name}(keras.optimizers.SGD("
                f"{argument}=...)). It acts on the reduced gradient there."
            )
        raise TypeError(f"{own_name} got an unknown argument {argument!r}.")


def _check_inner_optimizer(own_name: str, inner: Any) -> None:
    """Checks that the inner optimizer is a Keras optimizer."""
    if isinstance(inner, tf.compat.v1.train.Optimizer):
        raise TypeError(
            f"{own_name} wraps Keras optimizers, got the TF1 optimizer"
            f" {type(inner).__name__}. Use tf_xshard.compat.v1.{own_name} for"
            " it, or pass a Keras optimizer such as keras.optimizers.SGD(0.1)."
        )
    if checks.is_of_tf_keras(inner):
        raise TypeError(
            f"{own_name} wraps optimizers of Keras 3, got tf_keras's"
            f" {type(inner).__name__}. To reduce its gradients over groups,"
            " use tf_xshard.tf_keras.with_aggregator."
        )
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise TypeError(
            f"{own_name} wraps a keras.optimizers.Optimizer, got {inner!r}"
            f" ({type(inner).__name__}). Write {own_name}("
            "keras.optimizers.Adam(1e-3)), for example."
        )


def checked_groups(
    group_assignment: Any,
) -> group_assignment_lib.GroupAssignment | None:
    """Converts a `group_assignment` argument, and checks that it fits."""
    if group_assignment is None:
        return None
    groups = group_assignment_lib.GroupAssignment(group_assignment)
    if tf.distribute.has_strategy():
        strategy = tf.distribute.get_strategy()
        group_assignment_lib.for_replicas(
            groups,
            strategy.num_replicas_in_sync,
            f"the strategy {type(strategy).__name__}",
        )
    return groups


def checked_reducer(communication: Any) -> reducer.GradientReducer:
    """Checks a `communication` argument and returns a reducer with it."""
    communication = communication_lib.checked(communication)
    if tf.distribute.has_strategy():
        strategy = tf.distribute.get_strategy()
        allowed = wire_formats.TABLE[communication.dtype].strategies
        if allowed and site_lib.kind_of(strategy) not in allowed:
            raise ValueError(
                f'Communication(dtype="{communication.dtype}") can\'t be used'
                f" under {type(strategy).__name__}, which has no collectives"
                ' for it. Use dtype="bfloat16".'
            )
    return reducer.GradientReducer(communication)


def refuse_aggregation(
    name: str, strategy: tf.distribute.Strategy, variables: Sequence
) -> None:
    """Raises ValueError for a trained variable with an aggregation."""
    if strategy.num_replicas_in_sync == 1:
        return
    for one in variables:
        held = replica_variables.tensorflow_variable(one)
        if (
            variable_role.role_of(one) is variable_role.TRAINED
            and held.aggregation != tf.VariableAggregation.NONE
        ):
            raise ValueError(
                f"{name} can't train {replica_variables.path(one)!r}, which has"
                f" the aggregation {held.aggregation.name}: TensorFlow would"
                " combine the replicas' updates again, so steps would be too"
                " large and groups would be mixed. Create the variable with"
                ' aggregation="none", Keras\'s default.'
            )
