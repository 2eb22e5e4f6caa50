"""Sums over groups with the strategy's own all-reduce of a stack.

The stack's shape is [num_groups, ...]. A replica fills only its group's slot,
so the sum over all replicas has each group's sum in that group's slot. The sums
are correct under any replica numbering, but need num_groups times the bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.collectives import cross_replica_sum
from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport
from tf_xshard.collectives import watchdog


class OneHot(transport.Transport):
    """Communicates wherever the strategy's all-reduce works."""

    name = "one-hot stack through the strategy's all_reduce"
    spans_groups = True
    packs = True

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.sum`."""
        groups = self.groups
        index = self._own(
            [groups.group_of(r) for r in range(groups.num_replicas)]
        )
        sums = self._all_reduce(
            [
                transport.in_slot(one, index, groups.num_groups)
                for one in tensors
            ]
        )
        return [tf.gather(total, index) for total in sums]

    def _all_reduce(self, stacks: list[tf.Tensor]) -> list[tf.Tensor]:
        context = tf.distribute.get_replica_context()
        return [
            watchdog.run(
                functools.partial(
                    context.all_reduce, tf.distribute.ReduceOp.SUM, one
                ),
                [one],
                self.site.device,
                "0",
                float(self.communication.timeout_seconds),
                self._note(recorder.ALL_REDUCE, one, position),
            )
            for position, one in enumerate(stacks)
        ]

    @functools.cached_property
    def _participants(self) -> group_assignment_lib.GroupAssignment:
        return group_assignment_lib.GroupAssignment.single(
            self.site.num_replicas
        )


class OneHotOnTPU(OneHot):
    """Communicates in the same way on a TPU, which has no timeouts."""

    def _all_reduce(self, stacks: list[tf.Tensor]) -> list[tf.Tensor]:
        for position, one in enumerate(stacks):
            self._note(recorder.ALL_REDUCE, one, position)
        return tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, stacks
        )

    def check_dtype(self, dtype: tf.DType) -> None:
        """See `Transport.check_dtype`."""
        cross_replica_sum.check_dtype(dtype)
