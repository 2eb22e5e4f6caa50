"""Keras' clipping by norms, of gradients of which a replica has a shard.

The norm of a whole gradient needs the squares of all shards: one small sum over
the group.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_xshard.collectives import recorder
from tf_xshard.distribute import reduction_guard
from tf_xshard.distribute import site as site_lib
from tf_xshard.private import keras_optimizer_state
from tf_xshard.private import keras_sharded_updates
from tf_xshard.reduction import group_sum


def use(
    optimizer: keras.optimizers.Optimizer, reducer: group_sum.GroupReducer
) -> None:
    """Makes an optimizer clip by the norms of whole gradients.

    Args:
      optimizer: One that is made local and is built with shards.
      reducer: Sums over the groups that share a gradient.
    """
    num_variables = len(keras_optimizer_state.trainable_variables(optimizer))
    keras_sharded_updates.clip_with(
        optimizer, functools.partial(_clipped, reducer, num_variables)
    )


def _clipped(
    reducer: group_sum.GroupReducer,
    num_variables: int,
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """What Keras does with whole gradients."""
    gradients = [tf.convert_to_tensor(one) for one in gradients]
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        norm = optimizer.clipnorm
        squares = _squares(gradients, reducer, num_variables)
        return [
            gradient
            * tf.cast(norm / tf.maximum(tf.sqrt(square), norm), gradient.dtype)
            for gradient, square in zip(gradients, squares, strict=True)
        ]
    if optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
        norm = optimizer.global_clipnorm
        squares = _squares(gradients, reducer, num_variables)
        total = tf.sqrt(tf.add_n(squares))
        # Not finite if the norm is not.
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
    reducer: group_sum.GroupReducer,
    num_variables: int,
) -> list[tf.Tensor]:
    """The squared norm of each whole gradient, in at least float32."""
    dtype = tf.float32
    if any(one.dtype == tf.float64 for one in gradients):
        dtype = tf.float64
    own = tf.stack(
        [tf.reduce_sum(tf.square(tf.cast(one, dtype))) for one in gradients]
    )
    # Groups may hold different gradients but take part in one operation.
    padded = tf.pad(own, [[0, num_variables - len(gradients)]])
    labelled = recorder.labelled("norms", counts=[len(gradients)])
    with reduction_guard.lifted(), labelled:
        total = reducer.sum_over_group(padded, site_lib.current())
    return tf.unstack(total[: len(gradients)], len(gradients))
