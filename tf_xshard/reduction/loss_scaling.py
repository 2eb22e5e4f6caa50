"""What a LossScaleOptimizer inside a wrapper needs from all replicas.

It skips a step and halves its scale where it sees a gradient that is not
finite, and it looks at one replica's gradients. One flag over all replicas
makes them skip together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tf_xshard import collectives
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import indexed_slices
from tf_xshard.distribute import replica_context


def all_finite(gradients: Sequence) -> tf.Tensor:
    """Whether all numbers in this replica's gradients are finite.

    Args:
      gradients: Tensors, IndexedSlices or None.

    Returns:
      A scalar bool tensor.
    """
    flags = [
        tf.reduce_all(
            tf.math.is_finite(
                g.values if isinstance(g, tf.IndexedSlices) else g
            )
        )
        for g in gradients
        if g is not None
    ]
    return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)


def finite_everywhere(
    finite: tf.Tensor,
    here: replica_context.Here,
    communication: communication_lib.Communication,
) -> tf.Tensor:
    """Whether `finite` holds on all replicas, of all groups.

    Args:
      finite: This replica's flag, a scalar bool tensor.
      here: Where the code runs.
      communication: For its timeout.

    Returns:
      A scalar bool tensor, equal on all replicas.
    """
    if here.num_replicas == 1:
        return finite
    everyone = group_assignment_lib.GroupAssignment.contiguous(
        here.num_replicas, here.num_replicas
    )
    transport = collectives.choose(here, everyone)
    [count] = transport.group_sum(
        [tf.cast(tf.logical_not(finite), tf.float32)],
        here,
        everyone,
        communication,
    )
    return tf.equal(count, 0)


def poisoned_unless(finite: tf.Tensor, gradients: Sequence) -> list:
    """The gradients as they are, or nan in all of them.

    Args:
      finite: A scalar bool tensor.
      gradients: Tensors, IndexedSlices or None.

    Returns:
      A list like `gradients`.
    """
    return [
        indexed_slices.map_values(
            lambda x: tf.where(finite, x, tf.cast(math.nan, x.dtype)), g
        )
        for g in gradients
    ]
