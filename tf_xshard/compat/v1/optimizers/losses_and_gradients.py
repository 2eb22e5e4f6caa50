"""Checks and converts the losses and gradients that users pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.private.tensorflow import autograph


def map_loss(function: Callable[[Any], Any], loss: Any) -> Any:
    """Applies a function to a loss, now or when a callable loss is called."""
    if callable(loss) and not tf.is_tensor(loss):
        computed = autograph.as_called_by_user(loss)
        return lambda: function(computed())
    if loss is None or isinstance(loss, (list, tuple)):
        raise TypeError(f"loss must be a tensor or a function, got {loss!r}.")
    return function(loss)


def pairs_of(grads_and_vars: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Lists the (gradient, variable) pairs of any iterable."""
    pairs = []
    for pair in grads_and_vars:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(
                "grads_and_vars must hold (gradient, variable) pairs, got"
                f" {pair!r}."
            )
        gradient, variable = pair
        pairs.append((gradient, variable))
    if not pairs:
        raise ValueError("No variables provided: grads_and_vars is empty.")
    return pairs


def tensors_of(
    grads_and_vars: Sequence[tuple[Any, Any]],
) -> list[tuple[Any, Any]]:
    """Converts gradients to tensors, except IndexedSlices and None."""

    def converted(gradient: Any) -> Any:
        if gradient is None or isinstance(gradient, tf.IndexedSlices):
            return gradient
        return tf.convert_to_tensor(gradient)

    return [(converted(g), v) for g, v in grads_and_vars]
