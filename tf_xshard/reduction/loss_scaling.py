"""Makes all replicas skip the same steps, if any gradient is not finite.

A LossScaleOptimizer skips a step and halves its scale if a gradient is not
finite, but checks only one replica's gradients. Here, an overflow on any
replica makes all replicas skip. If the sum of the gradients does not show it to
all of them, they vote: one flag is summed over all replicas. `skip_nonfinite`
skips in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tf_xshard import collectives
from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import indexed_slices
from tf_xshard.distribute import site as site_lib


def is_finite(gradient: indexed_slices.Gradient) -> tf.Tensor:
    """Returns True if all values of a gradient are finite."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    return tf.reduce_all(tf.math.is_finite(gradient))


def all_finite(gradients: Sequence) -> tf.Tensor:
    """Returns True if all values in this replica's gradients are finite."""
    flags = [
        is_finite(gradient) for gradient in gradients if gradient is not None
    ]
    return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)


def votes(
    flags: Sequence[tf.Tensor],
    site: site_lib.Site,
    channel: transport_lib.Channel,
) -> list[tf.Tensor]:
    """Counts, for each flag, the replicas of all groups on which it is true."""
    own = tf.cast(tf.stack(flags), tf.float32)
    if site.num_replicas == 1:
        return tf.unstack(own)
    transport = collectives.transport_for(site, channel.over_all())
    with recorder.labelled("finite vote", counts=[0]):
        [counts] = transport.sum([own])
    return tf.unstack(counts)


def all_replicas_finite(
    gradients: Sequence, site: site_lib.Site, channel: transport_lib.Channel
) -> tf.Tensor:
    """Returns True on all replicas if the gradients of all are finite."""
    is_bad = tf.logical_not(all_finite(gradients))
    [count] = votes([is_bad], site, channel)
    return tf.equal(count, 0)


def nan_unless(finite: tf.Tensor, gradients: Sequence) -> list:
    """Returns the gradients unchanged if `finite`, else all nan."""
    return [
        indexed_slices.map_values(
            lambda x: tf.where(finite, x, tf.cast(math.nan, x.dtype)), g
        )
        for g in gradients
    ]
