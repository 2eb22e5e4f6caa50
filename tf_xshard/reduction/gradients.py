"""The user's gradients -> tensors, and IndexedSlices with unique indices."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_xshard.distribute import indexed_slices
from tf_xshard.private import tensorflow as private_tensorflow

# CollectiveReduceV2 and CrossReplicaSum have kernels for these.
SUMMABLE = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


def standardized(gradients: Sequence, variables: Sequence) -> list:
    """Gradients as tensors, or as IndexedSlices with each index once.

    Args:
      gradients: What a user passes to `apply`: values that convert to tensors
        of their variables' shapes, IndexedSlices, or None.
      variables: The variables.

    Returns:
      A list of tensors, IndexedSlices and None.

    Raises:
      TypeError: If a gradient is not a floating point number.
      ValueError: If a gradient does not have its variable's shape.
    """
    result: list[indexed_slices.Gradient] = []
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is None:
            result.append(None)
            continue
        gradient = indexed_slices.converted(gradient, variable)
        if gradient.dtype not in SUMMABLE:
            raise TypeError(
                f"The gradient for variable {variable.name!r} has type"
                f" {gradient.dtype.name}. Supported:"
                f" {[dtype.name for dtype in SUMMABLE]}. Cast it:"
                " tf.cast(gradient, tf.float32)."
            )
        if not gradient.shape.is_compatible_with(variable.shape):
            raise ValueError(
                f"The gradient for variable {variable.name!r} has shape"
                f" {gradient.shape}, but the variable has {variable.shape}."
                " Gradients and variables must be in the same order."
            )
        if isinstance(gradient, tf.IndexedSlices):
            if private_tensorflow.in_xla():
                # XLA needs static shapes, but the number of unique indices is
                # dynamic.
                gradient = indexed_slices.dense(gradient, variable)
            else:
                gradient = indexed_slices.unique(gradient)
        elif not gradient.shape.is_fully_defined():
            gradient = tf.ensure_shape(gradient, variable.shape)
        result.append(gradient)
    return result


def as_dtype(number: float | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """A number or scalar tensor as a scalar of a dtype, with all its digits.

    tf.cast would make float32 of a Python float first.
    """
    if tf.is_tensor(number):
        return tf.cast(number, dtype)
    return tf.constant(number, dtype)


def scaled(
    gradient: indexed_slices.Gradient, factor: float | tf.Tensor
) -> indexed_slices.Gradient:
    """`gradient * factor`, unchanged if the factor is the number 1.

    Args:
      gradient: A tensor, IndexedSlices or None.
      factor: A number or a scalar tensor, cast to the gradient's type.

    Returns:
      A gradient of the same kind.
    """
    if not tf.is_tensor(factor) and factor == 1:
        return gradient
    return indexed_slices.map_values(
        lambda values: values * as_dtype(factor, values.dtype), gradient
    )
