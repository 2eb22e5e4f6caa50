"""Sums over groups in cross-replica context, for eager MirroredStrategy.

In eager mode, the replicas run one after another. A collective in the first
replica would wait for replicas that have not started. `merge_call` gets the
tensors of all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.collectives import counters
from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport


class MergeCall(transport.Transport):
    """Communicates in this process and thread, without a timeout."""

    name = "sum per group in merge_call"
    spans_groups = True
    gathers = True

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.sum`."""
        return self._combined(recorder.ALL_REDUCE, tf.add_n, tensors)

    def gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.gather`."""
        return self._combined(
            recorder.ALL_GATHER, lambda values: tf.concat(values, 0), tensors
        )

    def all_to_all(self, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.all_to_all`."""
        position = self.position()
        stacks = self._combined(recorder.REDUCE_SCATTER, tf.stack, rows)
        return [stack[:, position] for stack in stacks]

    def all_gather(self, shards: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.all_gather`."""
        return self._combined(recorder.ALL_GATHER, tf.stack, shards)

    def _combined(
        self, operation: str, combine: Callable, tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Applies a function to the tensors of each group."""
        for position, tensor in enumerate(tensors):
            cost = self._note(operation, tensor, position)
            # A graph of TF1 is only built here, so there is nothing to count.
            if tf.executing_eagerly():
                counters.count_in_python(cost)

        def in_cross_replica_context(
            strategy: tf.distribute.Strategy, *per_replica: Any
        ) -> list:
            return [
                self._distributed(strategy, combine, one) for one in per_replica
            ]

        return tf.distribute.get_replica_context().merge_call(
            in_cross_replica_context,
            # merge_call makes one value of a tensor that all replicas share, so
            # each replica passes a copy.
            args=tuple(tf.identity(tensor) for tensor in tensors),
        )

    def _distributed(
        self,
        strategy: tf.distribute.Strategy,
        combine: Callable,
        per_replica: Any,
    ) -> Any:
        values = strategy.experimental_local_results(per_replica)
        combined = [
            combine([values[r] for r in members]) for members in self.groups
        ]

        def of_replica(context: Any) -> tf.Tensor:
            replica_id = context.replica_id_in_sync_group
            with tf.device(values[replica_id].device):
                return tf.identity(combined[self.groups.group_of(replica_id)])

        return strategy.experimental_distribute_values_from_function(of_replica)
