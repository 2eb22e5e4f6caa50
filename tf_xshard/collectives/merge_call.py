"""A sum per group in cross-replica context, for MirroredStrategy in eager mode.

There the replicas run one after another, so a collective in the first could
never meet its peers; `merge_call` is where all replicas' tensors come together.
"""

from __future__ import annotations

import tensorflow as tf

from tf_xshard.collectives import transport


def _merge(combine):
    """Makes a `GroupOperation` of a function on one group's tensors."""

    def operation(tensors, here, groups, communication):
        del communication  # Everything happens in this process and thread.

        def in_cross_replica_context(strategy, *per_replica):
            return [
                _distribute(
                    strategy,
                    groups,
                    combine,
                    strategy.experimental_local_results(values),
                )
                for values in per_replica
            ]

        return tf.distribute.get_replica_context().merge_call(
            in_cross_replica_context, args=tuple(tensors)
        )

    return operation


def _distribute(strategy, groups, combine, values):
    combined = [combine([values[r] for r in group]) for group in groups]

    def of_replica(context):
        group = groups.group_of(context.replica_id_in_sync_group)
        with tf.device(values[context.replica_id_in_sync_group].device):
            return tf.identity(combined[group])

    return strategy.experimental_distribute_values_from_function(of_replica)


TRANSPORT = transport.Transport(
    name="sum per group in merge_call",
    group_sum=_merge(tf.add_n),
    group_gather=_merge(lambda values: tf.concat(values, axis=0)),
    spans_groups=True,
)
