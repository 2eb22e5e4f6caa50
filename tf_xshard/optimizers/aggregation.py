"""What several towers have added up -> the gradients of one update."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from tf_xshard.distribute import indexed_slices
from tf_xshard.optimizers import inner_update
from tf_xshard.reduction import gradients as gradients_lib


def added(towers: Sequence[Sequence], variables: Sequence) -> list:
    """The sums over towers, 16-bit gradients as float32.

    Args:
      towers: For each tower a list of gradients: tensors of the variables'
        shapes, IndexedSlices or None.
      variables: The variables.

    Returns:
      One list like a tower's.
    """
    widened = [
        [
            indexed_slices.map_values(_widened, gradient)
            for gradient in gradients_lib.standardized(gradients, variables)
        ]
        for gradients in towers
    ]
    return [
        indexed_slices.added(column, variable)
        for column, variable in zip(
            zip(*widened, strict=True), variables, strict=True
        )
    ]


def aggregate(
    totals: Sequence,
    variables: Sequence,
    *,
    multiplier: float,
    num_towers: int | tf.Tensor,
    is_mean: bool,
) -> list:
    """The mean or sum of several towers, in the variables' types.

    Args:
      totals: Sums over towers: tensors of the variables' shapes, IndexedSlices
        or None.
      variables: The variables.
      multiplier: The factor that undoes a division of the loss.
      num_towers: How many towers, an int or a scalar tensor.
      is_mean: Whether the mean is wanted.

    Returns:
      A list like `totals`.
    """
    result = []
    for total, variable in zip(totals, variables, strict=True):
        # A statistic of the replica is no gradient of its loss.
        is_statistic = inner_update.is_overwritten(variable)
        scale = functools.partial(
            _scaled,
            multiplier=1 if is_statistic else multiplier,
            divisor=num_towers if is_mean or is_statistic else 1,
            dtype=variable.dtype,
        )
        result.append(indexed_slices.map_values(scale, total))
    return result


def _widened(values: tf.Tensor) -> tf.Tensor:
    """Casts 16-bit to float32, since sums would lose digits or overflow."""
    return tf.cast(values, tf.float32) if values.dtype.size < 4 else values


def _scaled(
    values: tf.Tensor,
    *,
    multiplier: float,
    divisor: int | tf.Tensor,
    dtype: str,
) -> tf.Tensor:
    """`values * multiplier / divisor` as `dtype`, with one multiplication."""
    if tf.is_tensor(divisor):
        divisor = tf.cast(divisor, values.dtype)
    factor = multiplier / divisor
    return tf.cast(gradients_lib.scaled(values, factor), dtype)
