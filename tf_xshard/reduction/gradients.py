"""Defines a batch of gradients, and checks and converts users' gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.distribute import indexed_slices
from tf_xshard.private.tensorflow import tracing

# CollectiveReduceV2 and CrossReplicaSum have kernels for these dtypes.
SUMMABLE = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


@dataclasses.dataclass(frozen=True)
class GradientBatch:
    """Holds gradients, their variables, and a factor that they still lack.

    Undoing 1/N and taking the mean over a group become one multiplication. Two
    multiplications would change bits if N is not a power of two.

    Attributes:
      values: Tensors of the variables' shapes, IndexedSlices with unique
        indices, or None.
      variables: The variables, in the same order.
      scale: The factor that `values` still lack.
    """

    values: list
    variables: list
    scale: float = 1

    def with_values(self, values: Iterable) -> GradientBatch:
        """Returns the same batch with other values."""
        return dataclasses.replace(self, values=list(values))

    def scaled(self, factor: float) -> GradientBatch:
        """Multiplies the factor that the values lack, not the values."""
        return dataclasses.replace(self, scale=self.scale * factor)

    def multiplied(self, divisor: int = 1) -> GradientBatch:
        """Multiplies the values by `scale / divisor`; sets `scale` to 1."""
        factor = self.scale if divisor == 1 else self.scale / divisor
        return GradientBatch(
            [scaled(value, factor) for value in self.values], self.variables
        )

    def where(self, wanted: Sequence[bool]) -> GradientBatch:
        """Returns the gradients and variables at the wanted positions."""
        return dataclasses.replace(
            self,
            values=[v for v, w in zip(self.values, wanted, strict=True) if w],
            variables=[
                v for v, w in zip(self.variables, wanted, strict=True) if w
            ],
        )

    def joined(self, other: GradientBatch) -> GradientBatch:
        """Concatenates two batches that lack the same factor."""
        assert self.scale == other.scale, (self.scale, other.scale)
        return dataclasses.replace(
            self,
            values=self.values + other.values,
            variables=self.variables + other.variables,
        )

    def pairs(self) -> list[tuple[Any, Any]]:
        """Returns (gradient, variable) pairs."""
        return list(zip(self.values, self.variables, strict=True))


def standardized(gradients: Sequence, variables: Sequence) -> list:
    """Converts gradients to tensors, or IndexedSlices with unique indices."""
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
            if tracing.in_xla():
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
    """Converts a number or scalar tensor to a dtype, with all its digits."""
    # tf.cast would first convert a Python float to float32.
    if tf.is_tensor(number):
        return tf.cast(number, dtype)
    return tf.constant(number, dtype)


def scaled(
    gradient: indexed_slices.Gradient, factor: float | tf.Tensor
) -> indexed_slices.Gradient:
    """Returns `gradient * factor`, or the gradient if the factor is 1."""
    if not tf.is_tensor(factor) and factor == 1:
        return gradient
    return indexed_slices.map_values(
        lambda values: values * as_dtype(factor, values.dtype), gradient
    )
