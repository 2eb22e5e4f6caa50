"""What AGNOptimizer may be given, and its copy of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import checks
from tf_xshard.optimizers import inner_update
from tf_xshard.optimizers import tree

ACCUMULATIONS = ("gradients", "updates")


def check(
    num_worker: Any, communication_period: Any, accumulate: Any, normalize: Any
) -> None:
    """Checks AGNOptimizer's arguments of those names.

    Raises:
      TypeError, ValueError: For what it can't take.
    """
    checks.positive_integer("communication_period", communication_period)
    if num_worker is not None:
        checks.positive_integer("num_worker", num_worker)
        found = tf.distribute.get_strategy().num_replicas_in_sync
        if num_worker != found:
            raise ValueError(
                f"num_worker is {num_worker}, and the strategy has {found}"
                " replicas. Leave it out, or make the optimizer in the"
                " scope of the strategy that trains."
            )
    if accumulate not in ACCUMULATIONS:
        raise ValueError(
            f"accumulate must be one of {ACCUMULATIONS}, got {accumulate!r}."
        )
    if not isinstance(normalize, bool):
        raise TypeError(f"normalize must be a bool, got {normalize!r}.")


def check_optimizers(inner_optimizer: Any, local_optimizer: Any) -> None:
    """Checks the two optimizers, of which the second may be None.

    Raises:
      ValueError: For what they must not be, or have inside.
    """
    for one in (inner_optimizer, local_optimizer):
        _refuse_inside(one)
    if getattr(inner_optimizer, "built", False):
        raise ValueError(
            f"The inner optimizer {inner_optimizer.name!r} has been built, for"
            " variables that are not the center. Give a new one."
        )
    if local_optimizer is not None and local_optimizer is inner_optimizer:
        raise ValueError(
            "local_optimizer is the inner optimizer itself. Give another"
            " object; None (the default) makes a copy."
        )


def check_variables(variables: Sequence) -> None:
    """Checks what will be trained.

    Raises:
      ValueError: For statistics of float8 training.
    """
    for variable in variables:
        if inner_update.is_overwritten(variable):
            raise ValueError(
                f"{variable.path} is overwritten by its gradient (float8"
                " training), which has no accumulation. AGNOptimizer does not"
                " take it; use CrossShardOptimizer or another dtype policy."
            )


def copied(
    inner_optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.Optimizer:
    """A local optimizer like the inner one.

    Raises:
      ValueError: If its config does not make another.
    """
    try:
        config = inner_optimizer.get_config()
        # Legacy .h5 files hold variables by path, hence by optimizer's name.
        config["name"] = f"{inner_optimizer.name}_local"
        return type(inner_optimizer).from_config(config)
    except Exception as error:
        raise ValueError(
            f"{type(inner_optimizer).__name__} can't be copied by its config"
            f" ({error}). Give AGNOptimizer a local_optimizer."
        ) from error


def _refuse_inside(optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return
    for one in tree.descendants(optimizer):
        if tree.is_wrapper(one):
            raise ValueError(
                f"{type(one).__name__} is inside AGNOptimizer, which reduces by"
                " itself. Give the optimizer that is inside of it."
            )
        if isinstance(one, keras.optimizers.LossScaleOptimizer) or (
            one.loss_scale_factor
        ):
            raise ValueError(
                "AGNOptimizer takes no loss scaling: replicas would scale apart"
                " between exchanges. Use bfloat16 (mixed_bfloat16), which needs"
                " none."
            )
