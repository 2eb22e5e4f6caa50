"""A batch of gradients, and the user's gradients -> such a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.distribute import indexed_slices
from tf_xshard.private.tensorflow import tracing

# CollectiveReduceV2 and CrossReplicaSum have kernels for these.
SUMMABLE = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


@dataclasses.dataclass(frozen=True)
class GradientBatch:
    """Gradients, their variables, and a factor that they still lack.

    The factor is carried, so that undoing 1/N and the mean over a group are one
    multiplication: two change bits if N is no power of two.

    Attributes:
      values: Tensors of the variables' shapes, IndexedSlices with unique
        indices, or None.
      variables: The variables, in the same order.
      scale: What `values` have yet to be multiplied by.
    """

    values: list
    variables: list
    scale: float = 1

    def with_values(self, values: Iterable) -> GradientBatch:
        """The same batch with other values."""
        return dataclasses.replace(self, values=list(values))

    def scaled(self, factor: float) -> GradientBatch:
        """The batch times a number, which is carried."""
        return dataclasses.replace(self, scale=self.scale * factor)

    def multiplied(self, divisor: int = 1) -> GradientBatch:
        """The batch with the carried factor, over a number, multiplied in."""
        factor = self.scale if divisor == 1 else self.scale / divisor
        return GradientBatch(
            [scaled(value, factor) for value in self.values], self.variables
        )

    def where(self, wanted: Sequence[bool]) -> GradientBatch:
        """The part of the batch at some positions."""
        return dataclasses.replace(
            self,
            values=[v for v, w in zip(self.values, wanted, strict=True) if w],
            variables=[
                v for v, w in zip(self.variables, wanted, strict=True) if w
            ],
        )

    def joined(self, other: GradientBatch) -> GradientBatch:
        """Both batches, of one factor, in one."""
        assert self.scale == other.scale, (self.scale, other.scale)
        return dataclasses.replace(
            self,
            values=self.values + other.values,
            variables=self.variables + other.variables,
        )

    def pairs(self) -> list[tuple[Any, Any]]:
        """(gradient, variable) pairs."""
        return list(zip(self.values, self.variables, strict=True))


def standardized(gradients: Sequence, variables: Sequence) -> list:
    """Gradients as tensors, or as IndexedSlices with each index once."""
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
    """A number or scalar tensor as a scalar of a dtype, with all its digits.

    tf.cast would make float32 of a Python float first.
    """
    if tf.is_tensor(number):
        return tf.cast(number, dtype)
    return tf.constant(number, dtype)


def scaled(
    gradient: indexed_slices.Gradient, factor: float | tf.Tensor
) -> indexed_slices.Gradient:
    """`gradient * factor`, unchanged if the factor is the number 1."""
    if not tf.is_tensor(factor) and factor == 1:
        return gradient
    return indexed_slices.map_values(
        lambda values: values * as_dtype(factor, values.dtype), gradient
    )
