"""Converts and adds IndexedSlices, the gradients of some rows of a variable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

# A tf.Tensor of the variable's shape, tf.IndexedSlices (some of its rows), or
# None (no gradient).
Gradient: TypeAlias = Any


class UniqueSlices(tf.IndexedSlices):
    """IndexedSlices in which each index appears once.

    The type saves later stages a check. TensorFlow loses the type where it
    decomposes a composite tensor, which only costs a second check.
    """


def converted(gradient: Any, variable: Any) -> Gradient:
    """Converts a gradient to a tensor, or to IndexedSlices of tensors."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(gradient)
    values, indices = gradient.values, gradient.indices
    shape = gradient.dense_shape
    if all(
        one is None or tf.is_tensor(one) for one in (values, indices, shape)
    ):
        return gradient
    return tf.IndexedSlices(
        tf.convert_to_tensor(values, dtype_hint=variable.dtype),
        tf.convert_to_tensor(indices, dtype_hint=tf.int64),
        None
        if shape is None
        else tf.convert_to_tensor(shape, dtype_hint=tf.int64),
    )


def unique(slices: tf.IndexedSlices) -> UniqueSlices:
    """Sums rows with the same index, so that each index appears once.

    Otherwise, norms, squares and the inner optimizer's moments would be
    computed from the duplicates instead of their sum.
    """
    if isinstance(slices, UniqueSlices):
        return slices
    indices, positions = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(
        slices.values, positions, tf.shape(indices)[0]
    )
    return UniqueSlices(values, indices, slices.dense_shape)


def dense(slices: tf.IndexedSlices, variable: Any) -> tf.Tensor:
    """Converts IndexedSlices to a tensor of the variable's shape."""
    return tf.math.unsorted_segment_sum(
        slices.values, slices.indices, variable.shape[0]
    )


def map_values(function: Callable, gradient: Gradient) -> Gradient:
    """Applies a function to a gradient's values; None stays None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        is_unique = isinstance(gradient, UniqueSlices)
        return (UniqueSlices if is_unique else tf.IndexedSlices)(
            function(gradient.values), gradient.indices, gradient.dense_shape
        )
    return function(gradient)


def added(gradients: Sequence[Gradient], variable: Any) -> Gradient:
    """Adds gradients of one variable; returns None if all are None."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in present):
        return unique(
            tf.IndexedSlices(
                tf.concat([gradient.values for gradient in present], 0),
                tf.concat([gradient.indices for gradient in present], 0),
                present[0].dense_shape,
            )
        )
    return tf.add_n(
        [
            dense(gradient, variable)
            if isinstance(gradient, tf.IndexedSlices)
            else gradient
            for gradient in present
        ]
    )
