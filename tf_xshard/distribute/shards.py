"""A tensor split evenly over the replicas of a group, element by element.

With n elements and g replicas, a replica's shard has ceil(n / g) elements, in
the order of the replicas' ids. The last shards are padded with zeros, which are
cut off again: n = 5, g = 3 gives [a b] [c d] [e 0].
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one tensor is split in each group.

    Attributes:
      shape: The shape of the whole tensor.
      groups: The groups of replicas.
    """

    shape: tuple[int, ...]
    groups: group_assignment_lib.GroupAssignment

    @property
    def num_elements(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of a shard, at least 1."""
        return max(1, -(-self.num_elements // self.groups.group_size))

    def position_of(self, replica_id: int) -> int:
        """Which shard a replica has."""
        return self.members_of(replica_id).index(replica_id)

    def members_of(self, replica_id: int) -> tuple[int, ...]:
        """The replicas of a replica's group, in the order of their shards.

        By ids, since TensorFlow's collectives order them by device.
        """
        return tuple(
            sorted(tuple(self.groups)[self.groups.group_of(replica_id)])
        )

    def split(self, whole: Any) -> tf.Tensor:
        """All shards of a tensor, [group_size, size]."""
        num_replicas = self.groups.group_size
        flat = _padded(
            tf.reshape(whole, [-1]),
            num_replicas * self.size - self.num_elements,
        )
        return tf.reshape(flat, [num_replicas, self.size])

    def shard(self, whole: Any, position: int | tf.Tensor) -> tf.Tensor:
        """One shard of a tensor.

        Args:
          whole: A tensor of `shape`.
          position: Which shard, an int or a scalar tensor.

        Returns:
          A tensor of shape [size].
        """
        if tf.is_tensor(position):
            return tf.gather(self.split(whole), position)
        begin = min(position * self.size, self.num_elements)
        end = min(begin + self.size, self.num_elements)
        own = tf.reshape(whole, [-1])[begin:end]
        return _padded(own, self.size - (end - begin))

    def shard_of_rows(self, rows: tf.IndexedSlices, position: int) -> tf.Tensor:
        """The shard of a gradient of some rows.

        Takes the memory of the shard, not of the whole tensor.

        Args:
          rows: IndexedSlices.
          position: Which shard.

        Returns:
          A tensor of shape [size].
        """
        row_size = math.prod(self.shape[1:])
        first_row, offset = divmod(position * self.size, max(row_size, 1))
        # The rows that the shard has elements of.
        num_rows = -(-(offset + self.size) // max(row_size, 1))
        index = tf.cast(rows.indices, tf.int64) - first_row
        is_own = tf.logical_and(index >= 0, index < num_rows)
        # Rows with a negative index are dropped.
        index = tf.where(is_own, index, -tf.ones_like(index))
        own = tf.math.unsorted_segment_sum(rows.values, index, num_rows)
        flat = tf.reshape(own, [num_rows * row_size])
        return _padded(
            flat[offset : offset + self.size],
            max(0, offset + self.size - num_rows * row_size),
        )

    def join(self, shards: Any) -> tf.Tensor:
        """Reverses `split`.

        Args:
          shards: A tensor of shape [group_size, size].

        Returns:
          A tensor of `shape`.
        """
        flat = tf.reshape(shards, [-1])
        return tf.reshape(flat[: self.num_elements], self.shape)


def _padded(flat: tf.Tensor, num_zeros: int) -> tf.Tensor:
    return tf.pad(flat, [[0, num_zeros]]) if num_zeros else flat
