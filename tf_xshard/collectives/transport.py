"""The one signature of every path on which a group communicates."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.collectives import channel as channel_lib
from tf_xshard.collectives import recorder
from tf_xshard.distribute import site as site_lib

_observers: list[Callable[[Transport, Sequence[tf.Tensor]], None]] = []


class Transport(abc.ABC):
    """A path, bound to one replica and its groups.

    Its methods are called on every replica, with that replica's own tensors.

    Attributes:
      name: A readable name.
      spans_groups: Whether replicas of other groups take part in the same
        operation, so that all must call it with the same list of tensors.
      packs: Whether tensors should be packed into buckets.
      gathers: Whether it has `gather`; if not, IndexedSlices are made dense.
    """

    name: ClassVar[str]
    spans_groups: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    gathers: ClassVar[bool] = False

    def __init__(
        self, site: site_lib.Site, channel: channel_lib.Channel
    ) -> None:
        self.site = site
        self.channel = channel
        self.groups = channel.groups
        self.communication = channel.communication

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums dense tensors over this replica's group.

        All replicas of the group pass tensors of the same known shapes and
        dtypes, and get the same bits.
        """
        for observer in tuple(_observers):
            observer(self, tensors)
        return self._sum(tensors)

    def reduce_scatter(self, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors over this replica's group, of which it gets one row.

        Args:
          rows: This replica's tensors, of shapes [group_size, size]. The other
            replicas of the group pass tensors of the same shapes and dtypes.

        Returns:
          For each tensor the row of the sum at this replica's position in its
          group, by replica ids, of shape [size], in its dtype or a wider one.
        """
        position = self.position()
        return [tf.gather(total, position) for total in self.sum(rows)]

    def all_gather(self, shards: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Stacks tensors of one shape over this replica's group.

        Args:
          shards: This replica's tensors, of shapes [size]. The other replicas
            of the group pass tensors of the same shapes and dtypes.

        Returns:
          For each tensor one of shape [group_size, size], by replica ids,
          bitwise equal on all replicas of the group.
        """
        position = self.position()
        return self.sum(
            [_in_row(t, position, self.groups.group_size) for t in shards]
        )

    def all_to_all(self, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends row i to the replica at position i of this one's group.

        Args:
          rows: This replica's tensors, of shapes [group_size, size]. The other
            replicas of the group pass tensors of the same shapes and dtypes.

        Returns:
          Tensors of the same shapes: row i is from position i.

        Raises:
          ValueError: If this path can only add up.
        """
        raise ValueError(
            'Communication(dtype="int8") needs an all-to-all, which this path'
            f" does not have: {self.name}. Use it under MirroredStrategy, or"
            " under MultiWorkerMirroredStrategy in a tf.function; elsewhere"
            ' dtype="bfloat16".'
        )

    def position(self) -> int | tf.Tensor:
        """This replica's position among those of its group, by replica ids."""
        groups, replica_id = self.groups, self.site.replica_id
        positions = {
            r: position
            for group in groups
            for position, r in enumerate(sorted(group))
        }
        if replica_id is not None:
            return positions[replica_id]
        context = tf.distribute.get_replica_context()
        return tf.gather(
            tf.constant([positions[r] for r in range(groups.num_replicas)]),
            context.replica_id_in_sync_group,
        )

    def gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Concatenates tensors over this replica's group, by replica ids."""
        raise NotImplementedError(self.name)

    def check_dtype(self, dtype: tf.DType) -> None:  # noqa: B027
        """Refuses a dtype that this path cannot sum."""

    def _participants(self) -> group_assignment_lib.GroupAssignment:
        """The replicas that take part in one operation together."""
        return self.groups

    def _note(
        self, operation: str, tensor: tf.Tensor, position: int
    ) -> recorder.Cost:
        """Records an operation that is being created."""
        groups = self._participants()
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

    @abc.abstractmethod
    def _sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `sum`."""


def _in_row(
    tensor: tf.Tensor, position: int | tf.Tensor, num_rows: int
) -> tf.Tensor:
    """Zeros of shape [num_rows, size], with a tensor in one row."""
    # A select, not a product: 0 * inf is nan.
    is_own = tf.equal(tf.range(num_rows), position)[:, tf.newaxis]
    return tf.where(is_own, tensor[tf.newaxis], tf.zeros_like(tensor))


@contextlib.contextmanager
def observed(
    observer: Callable[[Transport, Sequence[tf.Tensor]], None],
) -> Iterator[None]:
    """Calls a function before every group sum, for tests and benchmarks.

    It is called on each replica when a sum is traced (in eager mode, when it
    runs), in the same graph.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
