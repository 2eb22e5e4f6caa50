"""Reduced gradients -> inner optimizer -> variables, reduced no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_xshard.distribute import indexed_slices
from tf_xshard.optimizers import tree
from tf_xshard.private import keras_optimizers


def make_local(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer, and all below it, update this replica only.

    Idempotent; called again after `build`, in which a MultiOptimizer may make
    its optimizers.

    Args:
      optimizer: The inner optimizer.

    Raises:
      TypeError: If an optimizer reduces gradients by itself in a way that
        cannot be taken out.
    """
    keras_optimizers.make_local(
        one for one in tree.descendants(optimizer) if not tree.is_wrapper(one)
    )


def is_overwritten(variable: Any) -> bool:
    """Whether Keras assigns a variable its "gradient", as float8 training does.

    That is a statistic of the replica and no gradient of its loss.
    """
    return getattr(variable, "overwrite_with_gradient", False)


class Statistics(NamedTuple):
    """Values of variables that are overwritten by them.

    Attributes:
      values: One for each variable, or None.
      variables: The variables.
    """

    values: list
    variables: list


def split_statistics(
    gradients: Sequence, variables: Sequence
) -> tuple[list, list, Statistics]:
    """Tells gradients of a loss from what only looks like such.

    Args:
      gradients: Tensors of the variables' shapes, IndexedSlices or None.
      variables: The variables.

    Returns:
      The gradients, their variables, and `Statistics` of the others.
    """
    pairs = list(zip(gradients, variables, strict=True))
    ours, others = (
        [pair for pair in pairs if is_overwritten(pair[1]) == wanted]
        for wanted in (False, True)
    )
    return (
        [gradient for gradient, _ in ours],
        [variable for _, variable in ours],
        Statistics([value for value, _ in others], [v for _, v in others]),
    )


def apply(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence,
    variables: Sequence,
) -> None:
    """Lets the inner optimizer apply reduced gradients on this replica.

    Through `apply_gradients`, as `fit` does, which a subclass may override.

    Args:
      optimizer: The inner optimizer, which has been made local.
      gradients: A tensor or IndexedSlices of each variable's shape, or None.
      variables: The variables.
    """
    if any(one.loss_scale_factor for one in tree.descendants(optimizer)):
        # Keras divides gradients by it, and IndexedSlices can't be divided.
        gradients = [
            indexed_slices.dense(gradient, variable)
            if isinstance(gradient, tf.IndexedSlices)
            else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
    optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
