"""Defines `GroupAssignment`, the groups of replicas that reduce together."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tf_xshard import checks

_HINT = (
    "Expected a [num_groups, replicas_per_group] nested list of replica ids,"
    " such as [[0, 1], [2, 3]]."
)


def _is_sequence(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, (list, tuple, range))


def _is_integer(value: Any) -> bool:
    try:
        checks.integer("replica id", value)
    except TypeError:
        return False
    return True


def validated_rows(groups: Any) -> tuple[tuple[int, ...], ...]:
    """Checks groups, and returns them as tuples of ints."""
    for value in (groups, *groups) if _is_sequence(groups) else (groups,):
        if _is_integer(value) and value is not groups:
            raise ValueError(
                f"group_assignment is not two-dimensional: {groups!r}. {_HINT}"
            )
        if not _is_sequence(value):
            raise TypeError(
                f"group_assignment got {value!r} ({type(value).__name__}),"
                f" which is not a list of replica ids. {_HINT}"
            )
    for value in itertools.chain(*groups):
        if _is_sequence(value):
            raise ValueError(
                f"group_assignment has more than two dimensions: {groups!r}"
                f". {_HINT}"
            )
        if not _is_integer(value):
            raise TypeError(
                f"group_assignment holds {value!r} ({type(value).__name__}),"
                f" which is not an integer replica id: {groups!r}. {_HINT}"
            )
    rows = tuple(tuple(map(int, row)) for row in groups)
    if not any(rows):
        raise ValueError(f"group_assignment {groups!r} is empty. {_HINT}")
    least = min(itertools.chain(*rows))
    if least < 0:
        raise ValueError(
            f"group_assignment holds the negative replica id {least}:"
            f" {groups!r}. Replica ids start at 0."
        )
    _check_each_id_once(rows)
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            "group_assignment has groups of different sizes"
            f" {[len(row) for row in rows]}: {_shown(rows)}. All groups must"
            " have the same number of replicas."
        )
    return rows


def number_of_groups(num_replicas: int, group_size: int) -> int:
    """Returns the number of equal groups, or raises if sizes do not fit."""
    num_replicas = checks.positive_integer("num_replicas", num_replicas)
    group_size = checks.positive_integer("group_size", group_size)
    if num_replicas % group_size:
        raise ValueError(
            f"group_size={group_size} does not divide"
            f" num_replicas={num_replicas}: every replica must be in exactly"
            " one group, and all groups have the same size."
        )
    return num_replicas // group_size


def _check_each_id_once(rows: Sequence[Sequence[int]]) -> None:
    seen: dict[int, int] = {}
    for index, row in enumerate(rows):
        for replica_id in row:
            if replica_id in seen:
                where = (
                    f"twice in group {index}"
                    if seen[replica_id] == index
                    else f"in groups {seen[replica_id]} and {index}"
                )
                raise ValueError(
                    f"group_assignment puts replica {replica_id} {where}:"
                    f" {_shown(rows)}. Each replica id must appear exactly"
                    " once."
                )
            seen[replica_id] = index
    last = max(seen)
    missing = sorted(set(range(last + 1)) - set(seen))
    if missing:
        named = ", ".join(str(i) for i in missing[:8])
        more = ", ..." if len(missing) > 8 else ""
        raise ValueError(
            f"group_assignment leaves out replica {named}{more}: {_shown(rows)}"
            f". Every replica id from 0 to {last} must be in a group."
        )


def _shown(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(row) for row in rows]


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class GroupAssignment:
    """Assigns replicas to the groups that reduce their gradients together.

    Replicas share gradients within a group, not across groups. A
    `GroupAssignment` is frozen, hashable and compared by value, and needs no
    TensorFlow. A `group_assignment` argument also takes a nested list or an
    integer array. Create a `GroupAssignment` to find mistakes early.

    ```
    GroupAssignment([[0, 1], [2, 3]])        replica   0   1   2   3
                                             group     0   0   1   1
    reduced gradient on each replica           g0+g1   g0+g1   g2+g3   g2+g3
    ```

    Args:
      groups: A `[num_groups, replicas_per_group]` nested list, tuple or integer
        array of replica ids, or another `GroupAssignment`. Ids are
        `tf.distribute`'s `replica_id_in_sync_group`. Each id from 0 to
        `num_replicas - 1` appears exactly once, and all groups have the same
        size. The order of the groups, and of the ids in a group, is kept.

    Raises:
      TypeError: If `groups` is not a nested sequence, or an id is not an
        integer (a bool and a float are not).
      ValueError: If `groups` is empty or not two-dimensional, if groups differ
        in size, or if an id is negative, appears twice or is missing.

    Example:

    >>> groups = tf_xshard.GroupAssignment([[0, 1], [2, 3]])
    >>> groups.num_groups, groups.group_size, groups.num_replicas
    (2, 2, 4)
    >>> groups.group_of(2)
    1
    >>> groups == tf_xshard.GroupAssignment.contiguous(4, 2)
    True

    Source: `group_assignment` of `tf.compat.v1.tpu.CrossShardOptimizer`, which,
    unlike this class, accepts duplicate ids (`[[0, 1], [1, 0]]`).
    """

    _groups: tuple[tuple[int, ...], ...]
    _group_of: dict[int, int] = dataclasses.field(compare=False)

    def __init__(
        self, groups: GroupAssignment | Sequence[Sequence[int]] | np.ndarray
    ) -> None:
        rows = (
            groups._groups
            if isinstance(groups, GroupAssignment)
            else validated_rows(groups)
        )
        object.__setattr__(self, "_groups", rows)
        object.__setattr__(
            self,
            "_group_of",
            {r: index for index, row in enumerate(rows) for r in row},
        )

    @classmethod
    def contiguous(cls, num_replicas: int, group_size: int) -> GroupAssignment:
        """Creates groups of `group_size` consecutive replicas.

        Args:
          num_replicas: Number of replicas, an int >= 1.
          group_size: Replicas per group, an int that divides `num_replicas`.

        Returns:
          A `GroupAssignment` of `num_replicas // group_size` groups.

        Raises:
          TypeError: If an argument is not an int.
          ValueError: If an argument is less than 1, or `group_size` does not
            divide `num_replicas`.

        Example:

        >>> tf_xshard.GroupAssignment.contiguous(num_replicas=8, group_size=4)
        GroupAssignment([[0, 1, 2, 3], [4, 5, 6, 7]])
        """
        num_groups = number_of_groups(num_replicas, group_size)
        return cls(np.arange(num_replicas).reshape(num_groups, group_size))

    @classmethod
    def strided(cls, num_replicas: int, group_size: int) -> GroupAssignment:
        """Creates groups of every `num_groups`-th replica.

        With `num_groups = num_replicas // group_size`, group `i` holds the
        replicas `i, i + num_groups, i + 2 * num_groups, ...`.

        Args:
          num_replicas: Number of replicas, an int >= 1.
          group_size: Replicas per group, an int that divides `num_replicas`.

        Returns:
          A `GroupAssignment`, the transpose of
          `contiguous(num_replicas, num_groups)`.

        Raises:
          TypeError: If an argument is not an int.
          ValueError: If an argument is less than 1, or `group_size` does not
            divide `num_replicas`.

        Example:

        >>> tf_xshard.GroupAssignment.strided(num_replicas=8, group_size=4)
        GroupAssignment([[0, 2, 4, 6], [1, 3, 5, 7]])
        """
        num_groups = number_of_groups(num_replicas, group_size)
        return cls(np.arange(num_replicas).reshape(group_size, num_groups).T)

    @classmethod
    def single(cls, num_replicas: int) -> GroupAssignment:
        """Creates one group of all replicas.

        Args:
          num_replicas: Number of replicas, an int >= 1.

        Returns:
          A `GroupAssignment` of one group.

        Raises:
          TypeError: If `num_replicas` is not an int.
          ValueError: If `num_replicas` is less than 1.

        Example:

        >>> tf_xshard.GroupAssignment.single(4)
        GroupAssignment([[0, 1, 2, 3]])
        """
        return cls.contiguous(num_replicas, num_replicas)

    @classmethod
    def by_host(cls, strategy: Any) -> GroupAssignment:
        """Creates one group per host, which can reduce without the network.

        The hosts come from the cluster's addresses
        (MultiWorkerMirroredStrategy) or from the tasks of the strategy's
        devices. Processes on one host form one group.

        Args:
          strategy: A `tf.distribute.Strategy`.

        Returns:
          A `GroupAssignment`. In its `transposed()`, each group has one replica
          of every host.

        Raises:
          ValueError: If hosts have different numbers of replicas.

        Example:

        >>> strategy = tf.distribute.OneDeviceStrategy("CPU:0")
        >>> tf_xshard.GroupAssignment.by_host(strategy)
        GroupAssignment([[0]])
        """
        groups: dict[str, list[int]] = {}
        for replica_id, host in enumerate(_hosts(strategy)):
            groups.setdefault(host, []).append(replica_id)
        sizes = {host: len(members) for host, members in groups.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"by_host() found hosts with different numbers of replicas,"
                f" {sizes}, but groups must have the same size. Pass a nested"
                " list of groups with equal sizes as group_assignment, or train"
                " without groups."
            )
        return cls(list(groups.values()))

    def transposed(self) -> GroupAssignment:
        """Groups the first replicas of all groups, the second replicas, etc.

        Returns:
          A `GroupAssignment` of `group_size` groups.

        Example:

        >>> tf_xshard.GroupAssignment([[0, 1, 2], [3, 4, 5]]).transposed()
        GroupAssignment([[0, 3], [1, 4], [2, 5]])
        """
        return GroupAssignment([list(row) for row in zip(*self, strict=True)])

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return len(self._groups)

    @property
    def group_size(self) -> int:
        """The number of replicas in each group."""
        return len(self._groups[0])

    @property
    def num_replicas(self) -> int:
        """The number of replicas in all groups together."""
        return len(self._group_of)

    def group_of(self, replica_id: int) -> int:
        """Returns the index of the group that holds a replica.

        Args:
          replica_id: A replica id, an int in `[0, num_replicas)`.

        Returns:
          An int in `[0, num_groups)`.

        Raises:
          ValueError: If no group holds `replica_id`.

        Example:

        >>> tf_xshard.GroupAssignment([[0, 3], [1, 2]]).group_of(3)
        0
        """
        if replica_id not in self._group_of:
            raise ValueError(
                f"No group holds replica {replica_id!r}: {self!r} is for"
                f" replicas 0 to {self.num_replicas - 1}."
            )
        return self._group_of[replica_id]

    def to_list(self) -> list[list[int]]:
        """Returns the groups as a new nested list of ints.

        Returns:
          A `[num_groups, group_size]` nested list.

        Example:

        >>> tf_xshard.GroupAssignment(((0, 2), (1, 3))).to_list()
        [[0, 2], [1, 3]]
        """
        return [list(row) for row in self._groups]

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self._groups)

    def __repr__(self) -> str:
        return f"GroupAssignment({self.to_list()})"


def _hosts(strategy: Any) -> list[str]:
    """Returns the host of every replica, in the order of replica ids."""
    devices = list(strategy.extended.worker_devices)
    num_replicas = strategy.num_replicas_in_sync
    if len(devices) < num_replicas:
        # Each of several processes sees only its own devices.
        cluster = strategy.cluster_resolver.cluster_spec().as_dict()
        addresses = [
            address
            for job in ("chief", "worker")
            for address in cluster.get(job, ())
        ]
        return [
            address.rpartition(":")[0] for address in addresses for _ in devices
        ]
    # Drop the device from "/job:worker/replica:0/task:1/device:TPU:0".
    hosts = [device.rpartition("/device:")[0] for device in devices]
    # This process acts as all hosts of a simulated TPU.
    if len(set(hosts)) == 1 and getattr(strategy.extended, "num_hosts", 1) > 1:
        per_host = strategy.extended.num_replicas_per_host
        return [str(r // per_host) for r in range(num_replicas)]
    return hosts[:num_replicas]


def for_replicas(
    groups: GroupAssignment | None,
    num_replicas: int,
    where: str = "the strategy",
) -> GroupAssignment:
    """Checks that groups fit; converts None to one group of all replicas."""
    if groups is None:
        return GroupAssignment.single(num_replicas)
    if groups.num_replicas != num_replicas:
        remedy = f" Pass a group_assignment for {num_replicas} replicas."
        if where.startswith("the strategy "):
            remedy = (
                f" Pass a group_assignment for {num_replicas} replicas, or use"
                " the optimizer under the strategy that its groups were written"
                " for. To change a saved model's groups, load the model with"
                " compile=False, then compile it."
            )
        raise ValueError(
            f"group_assignment {groups.to_list()} is for"
            f" {groups.num_replicas} replicas, but {where} has {num_replicas}."
            f"{remedy}"
        )
    return groups


def same_groups(
    one: GroupAssignment,
    other: GroupAssignment,
) -> bool:
    """Returns whether the same replicas are grouped, in any order."""
    return set(map(frozenset, one)) == set(map(frozenset, other))


def joined(
    assignments: Sequence[GroupAssignment],
) -> GroupAssignment:
    """Merges groups of several assignments that share a replica."""
    # For example, nested optimizers that reduce over rows and over columns
    # together reduce over all replicas.
    first, *others = assignments
    groups = [set(group) for group in first]
    for assignment in others:
        for other in assignment:
            together = [group for group in groups if group & set(other)]
            rest = [group for group in groups if not group & set(other)]
            at = groups.index(together[0])
            groups = rest
            groups.insert(min(at, len(rest)), set().union(*together))
    if len(groups) == first.num_groups:
        return first
    return GroupAssignment([sorted(group) for group in groups])
