"""Divides whole variables among the replicas of a group.

Each variable has one owner, a position in the group. Values that belong to
owners are packed into tensors of one row for each owner, of equal length:

variables a and d of owner 0,     row 0   [a a a a d d 0]
b of owner 1, c of owner 2        row 1   [b b b b b b b]
                                  row 2   [c c c 0 0 0 0]

A reduce-scatter of the flattened tensor then gives each owner the sums of its
own variables, and an all-gather of rows gives all replicas all variables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_xshard.distribute import shards


class Balance(NamedTuple):
    """Tells how evenly the cost of an update is divided among owners."""

    # The cost of the owner with the most, divided by the mean.
    largest_owner: float
    # The key of the costliest variable, and its part of all costs.
    variable: Any
    share: float


def balance_of(
    costs: Mapping[Any, float], owner_of: Mapping[Any, int], num_owners: int
) -> Balance | None:
    """Returns the balance of owners, or None without any."""
    if not costs:
        return None
    totals = [0.0] * num_owners
    for name, cost in costs.items():
        totals[owner_of[name]] += cost
    largest = max(costs, key=costs.__getitem__)
    every = sum(totals)
    return Balance(
        max(totals) * num_owners / every, largest, costs[largest] / every
    )


def balanced(costs: Mapping[Any, float], num_owners: int) -> dict[Any, int]:
    """Chooses owners of about equal cost: the costliest first."""
    totals = [0.0] * num_owners
    owner_of = {}
    # Sorting keeps the order of equals, so all processes choose the same.
    for name in sorted(costs, key=costs.__getitem__, reverse=True):
        owner_of[name] = totals.index(min(totals))
        totals[owner_of[name]] += costs[name]
    return owner_of


@dataclasses.dataclass(frozen=True)
class Owned(shards.Division):
    """Places a whole tensor in its owner's part of a block.

    Has the interface of `shards.Layout`. The owner's block is a vector that may
    hold several tensors.
    """

    owner: int
    offset: int = 0

    def holders_of(self, replica_id: int) -> tuple[int, ...]:
        """Returns the replica of the group that holds the value."""
        return (self.members_of(replica_id)[self.owner],)

    @property
    def size(self) -> int:
        """The number of elements that the owner holds."""
        return self.num_elements

    def held(self, block: Any) -> Any:
        """Returns the flat part of the block where the owner has the value."""
        return block[self.offset : self.offset + self.num_elements]

    def joined(self, held: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the whole value from what its holder holds."""
        return held[0].reshape(self.shape)

    def stored(self, block: Any, whole: Any, position: int) -> Any:
        """Returns a replica's block, changed if the replica is the owner."""
        return self.placed(block, whole) if position == self.owner else block

    def placed(self, block: Any, whole: Any) -> Any:
        """Returns the owner's block with another value."""
        flat = tf.reshape(whole, [-1])
        end = self.offset + self.num_elements
        if self.num_elements == block.shape[0]:
            return flat
        return tf.concat([block[: self.offset], flat, block[end:]], 0)


def only_for_owner(value: tf.Tensor, owner: int, position: Any) -> tf.Tensor:
    """Returns a value on its owner, and zeros on other replicas."""
    if tf.is_tensor(position):
        return tf.where(tf.equal(position, owner), value, tf.zeros_like(value))
    return value if position == owner else zero_after([value], value.dtype)


def zero_after(values: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """Returns a scalar zero that exists once the values exist."""
    # An update waits for its gradients, also where another replica owns them.
    with tf.control_dependencies(values):
        return tf.zeros([], dtype)


@dataclasses.dataclass(frozen=True)
class Pack:
    """Packs some values, by position in a list, into rows of equal length.

    `rows[owner]` lists the values of an owner, in order. `shapes` are the
    shapes of all values of the list.
    """

    rows: tuple[tuple[int, ...], ...]
    shapes: Sequence[tuple[int, ...]]

    @property
    def row_size(self) -> int:
        """The length of the longest row, at least 1."""
        return max(1, *(sum(map(self._size, row)) for row in self.rows))

    @property
    def members(self) -> list[int]:
        """All values of the pack."""
        return [index for row in self.rows for index in row]

    def offsets(self) -> dict[int, int]:
        """Returns where each value begins in its owner's row."""
        result = {}
        for row in self.rows:
            end = 0
            for index in row:
                result[index] = end
                end += self._size(index)
        return result

    def row(self, values: Sequence[tf.Tensor], owner: int) -> tf.Tensor:
        """Returns the row of an owner, of shape [row_size]."""
        dtype = values[self.members[0]].dtype
        parts = [tf.reshape(values[index], [-1]) for index in self.rows[owner]]
        num_zeros = self.row_size - sum(map(self._size, self.rows[owner]))
        if num_zeros:
            parts.append(tf.zeros([num_zeros], dtype))
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0)

    def packed(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns all rows, flattened."""
        return tf.concat(
            [self.row(values, owner) for owner in range(len(self.rows))], 0
        )

    def unpacked_row(self, row: tf.Tensor, owner: int) -> dict[int, tf.Tensor]:
        """Returns the values in an owner's row."""
        sizes = [self._size(index) for index in self.rows[owner]]
        *parts, _ = tf.split(row, [*sizes, self.row_size - sum(sizes)])
        return {
            index: tf.reshape(part, self.shapes[index])
            for index, part in zip(self.rows[owner], parts, strict=True)
        }

    def unpacked(self, flat: tf.Tensor) -> dict[int, tf.Tensor]:
        """Returns all values of the flattened rows."""
        rows = tf.unstack(tf.reshape(flat, [len(self.rows), self.row_size]))
        result = {}
        for owner, row in enumerate(rows):
            result.update(self.unpacked_row(row, owner))
        return result

    def _size(self, index: int) -> int:
        return math.prod(self.shapes[index])


def packs(
    owners: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    kinds: Sequence[Hashable],
    num_owners: int,
    max_row_size: float,
) -> list[Pack]:
    """Divides values into packs of one kind, such as a dtype.

    A row has at most `max_row_size` elements, or one value.
    """
    result = []
    for kind in dict.fromkeys(kinds):
        waiting: list[list[int]] = [[] for _ in range(num_owners)]
        for index, owner in enumerate(owners):
            if kinds[index] == kind:
                waiting[owner].append(index)
        for values in waiting:
            # The smallest come last, so rows of a pack have similar lengths.
            values.sort(key=lambda index: math.prod(shapes[index]))
        while any(waiting):
            # The owner with the largest value decides about a row's length.
            largest = max(
                math.prod(shapes[values[-1]]) for values in waiting if values
            )
            limit = max(largest, max_row_size)
            rows = []
            for values in waiting:
                row: list[int] = []
                size = 0
                while values:
                    size += math.prod(shapes[values[-1]])
                    if row and size > limit:
                        break
                    row.append(values.pop())
                rows.append(tuple(row))
            result.append(Pack(tuple(rows), shapes))
    return result
