"""The strategy's own all-reduce over a [num_groups, ...] stack.

A replica fills only its group's slot, so the sum over all replicas holds each
group's sum in that group's slot: right under any numbering of the replicas, for
num_groups times the bytes.
"""

from __future__ import annotations

import tensorflow as tf

from tf_xshard.collectives import transport
from tf_xshard.collectives import watchdog


def _group_sum(tensors, here, groups, communication):
    context = tf.distribute.get_replica_context()
    if here.replica_id is not None:
        index = tf.constant(groups.group_of(here.replica_id))
    else:
        group_of = [groups.group_of(r) for r in range(groups.num_replicas)]
        index = tf.gather(
            tf.constant(group_of), context.replica_id_in_sync_group
        )
    mine = tf.equal(tf.range(groups.num_groups), index)

    def stack(tensor):
        # A select and no product: 0 * inf is nan, and one group's overflow
        # would reach the weights of all the others.
        slots = tf.reshape(mine, [-1] + [1] * tensor.shape.rank)
        return tf.where(slots, tensor[tf.newaxis], tf.zeros_like(tensor))

    def all_reduce(stacks):
        return context.all_reduce(tf.distribute.ReduceOp.SUM, stacks)

    stacks = [stack(tensor) for tensor in tensors]
    if here.kind == "tpu":
        sums = all_reduce(stacks)
    else:
        sums = [
            watchdog.run(
                lambda one=one: all_reduce([one])[0],
                one,
                here.device,
                0,
                float(communication.timeout_seconds),
            )
            for one in stacks
        ]
    return [tf.gather(total, index) for total in sums]


TRANSPORT = transport.Transport(
    name="one-hot stack through the strategy's all_reduce",
    group_sum=_group_sum,
    spans_groups=True,
    packs=True,
)
