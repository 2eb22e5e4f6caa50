"""Checks of AGNOptimizer's arguments, and its copy of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import checks
from tf_xshard.optimizers import inner_update
from tf_xshard.optimizers import tree
from tf_xshard.optimizers import wrapper_arguments
from tf_xshard.private import keras_optimizer_state

ACCUMULATIONS = ("gradients", "updates")


def check(
    num_worker: Any, communication_period: Any, accumulate: Any, normalize: Any
) -> None:
    """Checks AGNOptimizer's arguments of the same names.

    Raises:
      TypeError, ValueError: If an argument is invalid.
    """
    checks.positive_integer("communication_period", communication_period)
    if num_worker is not None:
        checks.positive_integer("num_worker", num_worker)
        found = tf.distribute.get_strategy().num_replicas_in_sync
        if num_worker != found:
            raise ValueError(
                f"num_worker is {num_worker}, but the strategy has {found}"
                " replicas. Leave it out, or create the optimizer in the"
                " scope of the strategy that trains."
            )
    if accumulate not in ACCUMULATIONS:
        raise ValueError(
            f"accumulate must be one of {ACCUMULATIONS}, got {accumulate!r}."
        )
    checks.boolean("normalize", normalize)


def check_optimizers(inner_optimizer: Any, local_optimizer: Any) -> None:
    """Checks the two optimizers; the second may be None.

    Raises:
      TypeError: If `local_optimizer` is not a Keras optimizer, or reduces
        gradients by itself.
      ValueError: If either is, or wraps, an optimizer that is not allowed, or
        has been built, or if the local one was created in another scope.
    """
    if not isinstance(
        local_optimizer, (keras.optimizers.Optimizer, type(None))
    ):
        raise TypeError(
            "local_optimizer must be a keras.optimizers.Optimizer, got"
            f" {local_optimizer!r}."
        )
    for one in (inner_optimizer, local_optimizer):
        _refuse_inside(one)
    if getattr(inner_optimizer, "built", False):
        raise ValueError(
            f"The inner optimizer {inner_optimizer.name!r} has been built for"
            " variables that are not the center. Pass a new one."
        )
    if local_optimizer is None:
        return
    if local_optimizer is inner_optimizer:
        raise ValueError(
            "local_optimizer is the inner optimizer itself. Pass another"
            " object, or None (the default) to make a copy."
        )
    if local_optimizer.built:
        raise ValueError(
            f"The local optimizer {local_optimizer.name!r} has been built, so"
            " its slots may be those of other variables. Pass a new one."
        )
    wrapper_arguments.check_same_scope(
        "AGNOptimizer",
        tf.distribute.get_strategy(),
        local_optimizer,
        "local",
    )
    inner_update.refuse_own_reductions(local_optimizer)


def check_variables(variables: Sequence) -> None:
    """Checks the variables that will be trained.

    Raises:
      ValueError: If one is a float8 training statistic.
    """
    for variable in variables:
        if inner_update.is_overwritten(variable):
            raise ValueError(
                f"{variable.path} is overwritten by its gradient (float8"
                " training), which can't be accumulated. AGNOptimizer does not"
                " support it; use CrossShardOptimizer or another dtype policy."
            )


def check_scope(name: str, strategy: tf.distribute.Strategy) -> None:
    """Checks that a step is in the scope of the optimizer's strategy.

    Args:
      name: The optimizer's name.
      strategy: The strategy in whose scope it was created.

    Raises:
      RuntimeError: If it has several replicas and is not entered.
    """
    if strategy.num_replicas_in_sync > 1 and not tf.distribute.has_strategy():
        raise RuntimeError(
            f"{name} was created in the scope of {type(strategy).__name__} but"
            " is applied outside of it, where there are no workers. Apply it in"
            " strategy.run()."
        )


def copied(
    inner_optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.Optimizer:
    """A local optimizer like the inner one.

    Raises:
      ValueError: If it can't be copied by its config.
    """
    try:
        config = inner_optimizer.get_config()
        # Legacy .h5 files key variables by path, which contains this name.
        config["name"] = f"{inner_optimizer.name}_local"
        result = type(inner_optimizer).from_config(config)
        # A MultiOptimizer may have others before it is built.
        for one, copy in zip(
            tree.descendants(inner_optimizer),
            tree.descendants(result),
            strict=False,
        ):
            keras_optimizer_state.copy_exclusions(one, copy)
        return result
    except Exception as error:
        raise ValueError(
            f"{type(inner_optimizer).__name__} can't be copied by its config"
            f" ({error}). Pass a local_optimizer to AGNOptimizer."
        ) from error


def _refuse_inside(optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return
    for one in tree.descendants(optimizer):
        if tree.is_wrapper(one):
            raise ValueError(
                f"{type(one).__name__} is inside AGNOptimizer, which reduces by"
                " itself. Pass the optimizer that it wraps instead."
            )
        if isinstance(one, keras.optimizers.LossScaleOptimizer) or (
            one.loss_scale_factor
        ):
            raise ValueError(
                "AGNOptimizer does not support loss scaling: the replicas'"
                " loss scales would diverge between exchanges. Use bfloat16"
                " (mixed_bfloat16), which needs none."
            )
