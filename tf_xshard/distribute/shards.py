"""Splits a tensor evenly over the replicas of a group, element by element.

With n elements and g replicas, a shard has ceil(n / g) elements. Shards are in
the order of the replicas' positions (`site.ranked`). Zeros pad the last shards,
and joining removes them. For example, n = 5 and g = 3 give [a b] [c d] [e 0].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_xshard.distribute import site as site_lib


@dataclasses.dataclass(frozen=True)
class Division:
    """Divides a tensor of `shape` over the replicas of each group."""

    shape: tuple[int, ...]
    groups: site_lib.RankedGroups

    @property
    def num_elements(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    def position_of(self, replica_id: int) -> int:
        """Returns a replica's position in its group."""
        return self.members_of(replica_id).index(replica_id)

    def members_of(self, replica_id: int) -> tuple[int, ...]:
        """Returns the replicas of a group, in the order of their positions."""
        return tuple(self.groups)[self.groups.group_of(replica_id)]


class Layout(Division):
    """Splits a tensor evenly, element by element."""

    @property
    def size(self) -> int:
        """The number of elements of a shard, at least 1."""
        return max(1, -(-self.num_elements // self.groups.group_size))

    def holders_of(self, replica_id: int) -> tuple[int, ...]:
        """Returns the replicas of a group that hold a part of its value."""
        return self.members_of(replica_id)

    def held(self, shard: Any) -> Any:
        """Returns what a replica holds of the value."""
        return shard

    def joined(self, held: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the whole value from what its holders hold."""
        flat = np.concatenate(held)
        return flat[: self.num_elements].reshape(self.shape)

    def stored(self, shard: Any, whole: Any, position: int) -> Any:
        """Returns what a replica holds of a new value."""
        del shard
        return self.shard(whole, position)

    def split(self, whole: Any) -> tf.Tensor:
        """Returns all shards of a tensor, of shape [group_size, size]."""
        num_replicas = self.groups.group_size
        flat = _padded(
            tf.reshape(whole, [-1]),
            num_replicas * self.size - self.num_elements,
        )
        return tf.reshape(flat, [num_replicas, self.size])

    def shard(self, whole: Any, position: int | tf.Tensor) -> tf.Tensor:
        """Returns the shard at a position, of shape [size]."""
        if tf.is_tensor(position):
            return tf.gather(self.split(whole), position)
        begin = min(position * self.size, self.num_elements)
        end = min(begin + self.size, self.num_elements)
        own = tf.reshape(whole, [-1])[begin:end]
        return _padded(own, self.size - (end - begin))

    def shard_of_rows(self, rows: tf.IndexedSlices, position: int) -> tf.Tensor:
        """Returns the shard of a gradient of some rows, of shape [size].

        Takes the memory of the shard, not of the whole tensor.
        """
        row_size = math.prod(self.shape[1:])
        first_row, offset = divmod(position * self.size, max(row_size, 1))
        # The shard has elements of this many rows.
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
        """Joins shards, of shape [group_size, size], to a tensor of `shape`."""
        flat = tf.reshape(shards, [-1])
        return tf.reshape(flat[: self.num_elements], self.shape)


def _padded(flat: tf.Tensor, num_zeros: int) -> tf.Tensor:
    return tf.pad(flat, [[0, num_zeros]]) if num_zeros else flat
