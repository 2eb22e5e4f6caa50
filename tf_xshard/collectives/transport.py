"""The one signature of every path of a group sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import replica_context

GroupOperation = Callable[
    [
        Sequence[tf.Tensor],
        replica_context.Here,
        group_assignment_lib.GroupAssignment,
        communication_lib.Communication,
    ],
    list[tf.Tensor],
]


@dataclasses.dataclass(frozen=True)
class Transport:
    """A path of a group sum. Called on every replica, with its own tensors.

    Attributes:
      name: A few words for people.
      group_sum: Takes this replica's dense tensors and returns their sums over
        its group, in order. All replicas of a group get the same bits.
      group_gather: Takes this replica's tensors, which may differ in their
        first dimension from replica to replica, and returns each concatenated
        over its group, in the group's order. None where a path has no such
        operation; IndexedSlices are made dense there.
      spans_groups: True where replicas of other groups take part in the same
        operation, so that all must call it with the same list of tensors.
      packs: True where tensors are better handed over packed into buckets.
    """

    name: str
    group_sum: GroupOperation
    group_gather: GroupOperation | None = None
    spans_groups: bool = False
    packs: bool = False
