"""A frozen catalog of what a model holds: variables, optimizers, groups.

It is created for each call of `GroupState`, by one walk over the model, since
the model may have been compiled again in between. Creating it changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import replica_context
from tf_xshard.distribute import replica_variables
from tf_xshard.group_state import walk
from tf_xshard.optimizers import tree
from tf_xshard.private import keras_optimizer_state

# Equal on all replicas of one group, unless something is wrong.
EQUAL_IN_A_GROUP = ("weight", "slot", "center")
# Learned state, as opposed to state that a step only uses.
LEARNED = (*EQUAL_IN_A_GROUP, "local", "statistic")

Optimizers = tuple[keras.optimizers.Optimizer, ...]


@dataclasses.dataclass(frozen=True)
class Catalog:
    """What a model, or another object given by the user, holds at one moment.

    Attributes:
      holders: What the user gave, by names of parts. A model's optimizers are
        separate parts.
      optimizers: For each part its optimizers, including nested ones.
      strategy: The strategy of the variables.
      groups: Which replicas are in which group.
      entries: Every variable of every part, in a deterministic order; a
        variable held by two parts is listed twice.
      centers: The variable that holds a group's value instead of a local
        variable trained by AGNOptimizer, by the id of the latter.
    """

    holders: Mapping[str, Any]
    optimizers: Mapping[str, Optimizers]
    strategy: tf.distribute.Strategy
    groups: group_assignment_lib.GroupAssignment
    entries: tuple[walk.StateVariable, ...]
    centers: Mapping[int, Any]

    def variables(
        self, kinds: Collection[str] | None = None, each_once: bool = True
    ) -> list[walk.StateVariable]:
        """All variables, or those of some kinds.

        Args:
          kinds: Kinds of `StateVariable`; None for all.
          each_once: Whether to list a variable of several parts only with the
            first.

        Returns:
          A list, in the order of `entries`.
        """
        seen: set[int] = set()
        result = []
        for one in self.entries:
            if each_once and one.key in seen:
                continue
            seen.add(one.key)
            if kinds is None or one.kind in kinds:
                result.append(one)
        return result

    def shown(self, variables: Sequence[walk.StateVariable]) -> list:
        """The variables that hold a group's values: for AGN, the center."""
        return [
            self.centers.get(id(one.variable), one.variable)
            for one in variables
        ]

    def checked_group(self, group: Any) -> int:
        """Checks a group's index.

        Args:
          group: The value given.

        Returns:
          The index as an int.

        Raises:
          ValueError: If there is no such group.
        """
        num_groups = self.groups.num_groups
        if (
            isinstance(group, bool)
            or not isinstance(group, (int, np.integer))
            or not 0 <= group < num_groups
        ):
            raise ValueError(
                f"group must be an int from 0 to {num_groups - 1}, got"
                f" {group!r}: the groups are {self.groups.to_list()}."
            )
        return int(group)

    def optimizer_classes(self) -> dict[str, list[str]]:
        """The classes of each part's optimizers, including nested ones."""
        return {
            name: [type(one).__name__ for one in found]
            for name, found in self.optimizers.items()
            if found
        }


def of(
    holder: Any,
    groups: group_assignment_lib.GroupAssignment | None = None,
) -> Catalog:
    """A catalog of what a user gave, as it is now.

    Args:
      holder: A model, a dict of objects that hold variables, or a list.
      groups: The groups; None for the combined groups of the optimizers.

    Returns:
      A `Catalog`.

    Raises:
      TypeError: If something holds no variables.
      ValueError: If variables belong to different strategies, two optimizers
        have different groups, or the groups do not fit the replicas.
    """
    parts = walk.parts_of(holder)
    optimizers = {
        name: tuple(
            one
            for optimizer in part.optimizers
            for one in tree.with_local_optimizers(optimizer)
        )
        for name, part in parts.items()
    }
    kinds: dict[int, str] = {}
    centers: dict[int, Any] = {}
    for found in optimizers.values():
        for one in found:
            if tree.is_wrapper(one) and one.built:
                kinds.update(one._kinds_of_state())
                centers.update(one._centers_by_variable())
    entries = tuple(_entries(parts, kinds))
    strategy = _strategy(holder, entries, optimizers)
    num_replicas = strategy.num_replicas_in_sync
    if groups is None:
        groups = _groups_of(optimizers, num_replicas)
    return Catalog(
        holders={name: part.holder for name, part in parts.items()},
        optimizers=optimizers,
        strategy=strategy,
        groups=group_assignment_lib.for_replicas(groups, num_replicas),
        entries=entries,
        centers=centers,
    )


def _entries(
    parts: Mapping[str, walk.Part], kinds: Mapping[int, str]
) -> Iterator[walk.StateVariable]:
    for name, part in parts.items():
        seen: set[int] = set()
        for one in walk.variables_of(name, part.holder, part.held):
            if one.key in seen:
                continue
            seen.add(one.key)
            if one.key in kinds:
                one = dataclasses.replace(one, kind=kinds[one.key])
            yield one


def _strategy(
    holder: Any,
    entries: Sequence[walk.StateVariable],
    optimizers: Mapping[str, Optimizers],
) -> tf.distribute.Strategy:
    """The one strategy of all that was found."""
    found = [replica_variables.strategy_of(one.variable) for one in entries]
    found += [
        keras_optimizer_state.strategy_of(one)
        for of_part in optimizers.values()
        for one in of_part
    ]
    strategies = list(
        {
            id(one): one
            for one in found
            if one is not None and not replica_context.is_default(one)
        }.values()
    )
    if len(strategies) > 1:
        raise ValueError(
            f"GroupState got variables of {len(strategies)} strategies,"
            f" {[type(one).__name__ for one in strategies]}. Create all of"
            " them in the scope of one strategy."
        )
    if strategies:
        return strategies[0]
    if isinstance(holder, keras.Model):
        return holder.distribute_strategy
    return tf.distribute.get_strategy()


def _groups_of(
    optimizers: Mapping[str, Optimizers], num_replicas: int
) -> group_assignment_lib.GroupAssignment:
    """The combined groups of nested optimizers.

    Raises:
      ValueError: If two parts have different groups.
    """
    found = {}
    for name, of_part in optimizers.items():
        assignments = [
            group_assignment_lib.for_replicas(
                one.group_assignment, num_replicas
            )
            for one in of_part
            if tree.is_wrapper(one)
        ]
        if assignments:
            found[name] = group_assignment_lib.joined(assignments)
    # A plain Keras optimizer reduces over all replicas.
    first, *others = found.values() or [
        group_assignment_lib.GroupAssignment.single(num_replicas)
    ]
    if not all(
        group_assignment_lib.same_groups(first, other) for other in others
    ):
        raise ValueError(
            "GroupState: optimizers have different groups,"
            f" { {n: g.to_list() for n, g in found.items()} }. Pass"
            " group_assignment, or create one GroupState for each."
        )
    return first
