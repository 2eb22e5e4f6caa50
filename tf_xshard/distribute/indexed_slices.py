"""IndexedSlices: gradients of some rows of a variable."""

from __future__ import annotations

import tensorflow as tf


def deduplicated(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up rows of one index, so that each index appears once.

    Duplicates count as one gradient: norms, squares and the inner optimizer's
    moments would otherwise be taken of the parts and not of their sum.
    """
    indices, positions = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(
        slices.values, positions, tf.shape(indices)[0]
    )
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def dense(slices: tf.IndexedSlices, variable) -> tf.Tensor:
    """The gradient as a tensor of the variable's shape."""
    return tf.math.unsorted_segment_sum(
        slices.values, slices.indices, variable.shape[0]
    )


def map_values(function, gradient):
    """Applies `function` to a gradient's numbers; None stays None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            function(gradient.values), gradient.indices, gradient.dense_shape
        )
    return function(gradient)


def added(gradients, variable):
    """The sum of gradients of one variable; None where all are None.

    IndexedSlices stay such if all are, with each index once.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in present):
        return deduplicated(
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
