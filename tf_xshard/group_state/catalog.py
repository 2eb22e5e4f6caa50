"""A frozen catalog of what a model holds: variables, optimizers, groups.

It is created for each call of `GroupState`, by one walk over a model, since
the model may have been compiled again in between. Creating it changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import group_relations
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.group_state import optimizer_groups
from tf_xshard.group_state import state_variable
from tf_xshard.group_state import walk
from tf_xshard.optimizers import stack
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
    entries: tuple[state_variable.StateVariable, ...]
    centers: Mapping[int, Any]

    def variables(
        self, kinds: Collection[str] | None = None, each_once: bool = True
    ) -> list[state_variable.StateVariable]:
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

    def shown(self, variables: Sequence[state_variable.StateVariable]) -> list:
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

    def check_built(self, is_model: bool) -> None:
        """Checks that there are variables, and that layers have theirs.

        Args:
          is_model: Whether the user gave a model, whose own optimizer can be
            built later.

        Raises:
          ValueError: If something has not been built, or there are none.
        """
        for name, part in self.holders.items():
            if getattr(part, "built", True):
                continue
            if isinstance(part, keras.Layer):
                raise ValueError(
                    f"GroupState: {name!r} has not been built, so it has no"
                    " variables. Give it an Input, or call it on a batch"
                    " first."
                )
            if isinstance(part, keras.optimizers.Optimizer) and not (
                is_model and name == "optimizer"
            ):
                raise ValueError(
                    f"GroupState: the optimizer {name!r} has not been built."
                    " Call build(variables) on it, in the strategy's scope."
                )
        if not self.entries:
            raise ValueError(
                f"GroupState found no variables in {list(self.holders)}. Build"
                " the model first."
            )

    def communication(self) -> communication_lib.Communication:
        """That of the first optimizer that has one."""
        for found in self.optimizers.values():
            for one in found:
                if hasattr(one, "communication"):
                    return one.communication
        return communication_lib.Communication()

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
    parts, optimizers = _walked(holder)
    kinds: dict[int, str] = {}
    centers: dict[int, Any] = {}
    for found in optimizers.values():
        for one in found:
            if tree.is_wrapper(one) and one.built:
                kinds.update(one._kinds_of_state())
                centers.update(one._centers_by_variable())
    entries = tuple(_entries(parts, kinds))
    strategy = _strategy(holder, entries, optimizers)
    where = f"the strategy {type(strategy).__name__}"
    num_replicas = strategy.num_replicas_in_sync
    if groups is None:
        groups = optimizer_groups.joined(optimizers, num_replicas, where)
    return Catalog(
        holders={name: part.holder for name, part in parts.items()},
        optimizers=optimizers,
        strategy=strategy,
        groups=group_relations.for_replicas(groups, num_replicas, where),
        entries=entries,
        centers=centers,
    )


def groups_of(
    holder: Any, strategy: tf.distribute.Strategy
) -> group_assignment_lib.GroupAssignment:
    """The groups that the optimizers make, without a catalog of the rest.

    Args:
      holder: A model, a dict of what holds variables, or a list.
      strategy: The strategy of the variables.

    Returns:
      A `GroupAssignment`.

    Raises:
      ValueError: If two optimizers make different groups, or the groups are
        for another number of replicas.
    """
    return optimizer_groups.joined(
        _walked(holder)[1],
        strategy.num_replicas_in_sync,
        f"the strategy {type(strategy).__name__}",
    )


def _walked(
    holder: Any,
) -> tuple[dict[str, walk.Part], dict[str, Optimizers]]:
    """The parts, and the optimizers of each, those inside others included."""
    parts = walk.parts_of(holder)
    held = [one for part in parts.values() for one in part.optimizers]
    for optimizer in held:
        # Its groups depend on what is around it now.
        if not any(
            inner is optimizer
            for other in held
            if other is not optimizer
            for inner in tree.with_local_optimizers(other)
        ):
            stack.settle(optimizer)
    return parts, {
        name: tuple(
            one
            for optimizer in part.optimizers
            for one in tree.with_local_optimizers(optimizer)
        )
        for name, part in parts.items()
    }


def _entries(
    parts: Mapping[str, walk.Part], kinds: Mapping[int, str]
) -> Iterator[state_variable.StateVariable]:
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
    entries: Sequence[state_variable.StateVariable],
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
            if one is not None and not site_lib.is_default(one)
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
