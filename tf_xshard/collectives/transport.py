"""Defines who communicates (`Channel`), and the base class of all paths."""

from __future__ import annotations

import abc
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar

import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.collectives import recorder
from tf_xshard.distribute import site as site_lib

_lock = threading.RLock()
_taken: set[int] = set()


@dataclasses.dataclass(frozen=True)
class Channel:
    """Holds groups of replicas, their communication settings, and a number.

    No other channel in use has the same `number`, which comes from
    `number_for`. It is 0 for collectives that run only while no others run.
    """

    groups: group_assignment_lib.GroupAssignment
    communication: communication_lib.Communication
    number: int = 0

    def over_all(self) -> Channel:
        """Returns the same channel for one group of all replicas."""
        groups = group_assignment_lib.GroupAssignment.single(
            self.groups.num_replicas
        )
        return dataclasses.replace(self, groups=groups)

    def exact(self) -> Channel:
        """Returns the same channel for values that must arrive unchanged."""
        return dataclasses.replace(
            self, communication=self.communication.exact()
        )


def number_for(holder: object) -> int:
    """Returns the smallest positive number that no other living object has."""
    # TensorFlow keeps keys and counters of collectives forever, so numbers are
    # reused when their holders are garbage collected.
    with _lock:
        number = next(n for n in range(1, len(_taken) + 2) if n not in _taken)
        _taken.add(number)
    weakref.finalize(holder, _taken.discard, number)
    return number


class Transport(abc.ABC):
    """Communicates on one path, for one replica and its groups.

    Every replica calls the same methods, with its own tensors.

    Attributes:
      groups: The channel's groups, with their replicas in the order of their
        positions.
      name: A readable name.
      spans_groups: True if replicas of other groups take part in the same
        operation. All replicas must then pass the same list of tensors.
      packs: True if tensors should be packed into buckets.
      gathers: True if the path has `gather`. Otherwise, IndexedSlices are made
        dense.
    """

    name: ClassVar[str]
    spans_groups: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    gathers: ClassVar[bool] = False

    def __init__(self, site: site_lib.Site, channel: Channel) -> None:
        self.site = site
        self.channel = channel
        self.groups = site_lib.ranked(channel.groups, site.strategy)
        self.communication = channel.communication

    @abc.abstractmethod
    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums dense tensors over this replica's group.

        All replicas of the group pass tensors of the same known shapes and
        dtypes, and get the same bits.
        """

    def reduce_scatter(self, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors over this replica's group, and returns one row of each.

        All replicas of the group pass the same shapes [group_size, size] and
        dtypes. A replica gets the row at its `position`, of shape [size], in
        the tensor's dtype or a wider dtype.
        """
        position = self.position()
        return [tf.gather(total, position) for total in self.sum(rows)]

    def all_gather(self, shards: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Stacks tensors over this replica's group, by positions.

        All replicas of the group pass the same shapes [size] and dtypes. They
        get the same bits, of shape [group_size, size].
        """
        position = self.position()
        return self.sum(
            [in_slot(t, position, self.groups.group_size) for t in shards]
        )

    def all_to_all(self, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends row i to the replica at position i of this replica's group.

        All replicas of the group pass the same shapes [group_size, size] and
        dtypes. Row i of a result is from the replica at position i. Raises
        ValueError if this path can only sum.
        """
        raise ValueError(
            f'Communication(dtype="{self.communication.dtype}") needs an'
            f" all-to-all, which this path does not have: {self.name}. Use it"
            " under MirroredStrategy, or under MultiWorkerMirroredStrategy in a"
            ' tf.function. Elsewhere, use dtype="bfloat16".'
        )

    def position(self) -> int | tf.Tensor:
        """Returns this replica's position in its group; see `site.ranked`."""
        positions = {
            r: position
            for group in self.groups
            for position, r in enumerate(group)
        }
        return self._own([positions[r] for r in range(len(positions))])

    def gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Concatenates tensors over this replica's group, by positions."""
        raise NotImplementedError(self.name)

    def check_dtype(self, dtype: tf.DType) -> None:  # noqa: B027
        """Raises ValueError for a dtype that this path can't sum."""

    def _own(self, numbers: Sequence[int]) -> int | tf.Tensor:
        """Returns this replica's number, of one for each replica id."""
        if self.site.replica_id is not None:
            return numbers[self.site.replica_id]
        context = tf.distribute.get_replica_context()
        return tf.gather(tf.constant(numbers), context.replica_id_in_sync_group)

    @functools.cached_property
    def _participants(self) -> group_assignment_lib.GroupAssignment:
        """Returns the groups of replicas that share one operation."""
        return self.channel.groups

    def _note(
        self, operation: str, tensor: tf.Tensor, position: int
    ) -> recorder.Cost:
        """Records an operation that is being created; returns its cost."""
        groups = self._participants
        recorder.note(
            operation,
            self.name,
            groups,
            self.site.replica_id,
            tensor,
            position,
        )
        num_elements = tensor.shape.num_elements()
        if num_elements is None:
            num_elements = tf.size(tensor, tf.int64)
        num_bytes = tensor.dtype.size * num_elements
        return recorder.cost(operation, num_bytes, groups.group_size)


def sum_of_rows(rows: tf.Tensor) -> tf.Tensor:
    """Sums over the first dimension, in float32 for 16-bit dtypes."""
    if rows.dtype.size < 4:
        rows = tf.cast(rows, tf.float32)
    return tf.reduce_sum(rows, 0)


def sum_by_parts(
    tensor: tf.Tensor,
    group_size: int,
    all_to_all: Callable[[tf.Tensor], tf.Tensor],
    all_gather: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Sums over a group whose library moves a dtype, but does not sum it.

    Each replica sums a part. The functions are `Transport`'s, for one tensor.
    An all-reduce sends as many bytes.
    """
    num_elements = tensor.shape.num_elements()
    flat = tf.pad(tf.reshape(tensor, [-1]), [[0, -num_elements % group_size]])
    part = sum_of_rows(all_to_all(tf.reshape(flat, [group_size, -1])))
    parts = all_gather(tf.cast(part, tensor.dtype))
    return tf.reshape(tf.reshape(parts, [-1])[:num_elements], tensor.shape)


def in_slot(
    tensor: tf.Tensor, index: int | tf.Tensor, num_slots: int
) -> tf.Tensor:
    """Returns zeros of shape [num_slots, ...] with a tensor in one slot."""
    is_own = tf.equal(tf.range(num_slots), index)
    is_own = tf.reshape(is_own, [-1] + [1] * tensor.shape.rank)
    # Select instead of multiplying. 0 * inf is nan, so one group's overflow
    # would reach the weights of all other groups.
    return tf.where(is_own, tensor[tf.newaxis], tf.zeros_like(tensor))
