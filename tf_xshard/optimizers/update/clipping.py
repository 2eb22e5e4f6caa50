"""Clips shards of gradients by whole norms, from one small sum per group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.collectives import recorder
from tf_xshard.distribute import reduction_guard
from tf_xshard.distribute import site as site_lib
from tf_xshard.private.keras import optimizer_state
from tf_xshard.private.keras import sharded_updates
from tf_xshard.reduction import reducer as reducer_lib


def use(
    optimizer: keras.optimizers.Optimizer,
    reducer: reducer_lib.GradientReducer,
    groups: group_assignment_lib.GroupAssignment,
) -> None:
    """Makes an optimizer clip by the norms of whole gradients."""
    num_variables = len(optimizer_state.trainable_variables(optimizer))

    sharded_updates.clip_with(
        optimizer,
        functools.partial(
            _clipped,
            functools.partial(_sum_over_group, reducer, groups, num_variables),
        ),
    )


def _sum_over_group(
    reducer: reducer_lib.GradientReducer,
    groups: group_assignment_lib.GroupAssignment,
    num_variables: int,
    squares: tf.Tensor,
) -> tf.Tensor:
    """Returns the group's sums of squares, of shape [number of gradients]."""
    count = squares.shape[0]
    # Groups may have different gradients, but take part in one operation.
    padded = tf.pad(squares, [[0, num_variables - count]])
    labelled = recorder.labelled("norms", counts=[count])
    with reduction_guard.lifted(), labelled:
        [total] = reducer.transport(site_lib.current(), groups).sum([padded])
    return total[:count]


def _clipped(
    sum_over_group: Callable[[tf.Tensor], tf.Tensor],
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Clips shards as Keras clips whole gradients."""
    gradients = [tf.convert_to_tensor(one) for one in gradients]
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        norm = optimizer.clipnorm
        squares = _squares(gradients, sum_over_group)
        return [
            gradient
            * tf.cast(norm / tf.maximum(tf.sqrt(square), norm), gradient.dtype)
            for gradient, square in zip(gradients, squares, strict=True)
        ]
    if optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
        norm = optimizer.global_clipnorm
        squares = _squares(gradients, sum_over_group)
        total = tf.sqrt(tf.add_n(squares))
        # `total - total` makes the scale NaN if the norm is not finite.
        scale = norm * tf.minimum(1.0 / total, 1.0 / norm) + (total - total)
        return [
            gradient * tf.cast(scale, gradient.dtype) for gradient in gradients
        ]
    bound = optimizer.clipvalue
    if bound and bound > 0:
        return [tf.clip_by_value(one, -bound, bound) for one in gradients]
    return gradients


def _squares(
    gradients: Sequence[tf.Tensor],
    sum_over_group: Callable[[tf.Tensor], tf.Tensor],
) -> list[tf.Tensor]:
    """Returns the squared norms of whole gradients, in at least float32."""
    dtype = tf.float32
    if any(one.dtype == tf.float64 for one in gradients):
        dtype = tf.float64
    own = tf.stack(
        [tf.reduce_sum(tf.square(tf.cast(one, dtype))) for one in gradients]
    )
    return tf.unstack(sum_over_group(own), len(gradients))
