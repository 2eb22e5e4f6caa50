"""The variables of groups of replicas: one value per group of each.

What `GroupState` does with them, without what it does with models and files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import replica_context
from tf_xshard.distribute import replica_variables
from tf_xshard.group_state import catalog
from tf_xshard.group_state import combine
from tf_xshard.group_state import replica_values
from tf_xshard.optimizers import cross_shard_optimizer


class GroupVariables:
    """Base class of `GroupState`, which has the documentation."""

    def __init__(
        self,
        model: keras.Model | Mapping[str, Any] | Sequence,
        group_assignment: (
            group_assignment_lib.GroupAssignment | Sequence | np.ndarray | None
        ) = None,
    ):
        replica_context.refuse_replica_context("GroupState")
        self._model = model if isinstance(model, keras.Model) else None
        self._holder = model
        strategy = self._strategy()
        replica_context.kind_of(strategy)
        self._num_replicas = strategy.num_replicas_in_sync
        self._given_groups = group_assignment
        if group_assignment is not None:
            self._given_groups = cross_shard_optimizer.groups_for(
                group_assignment_lib.GroupAssignment(group_assignment),
                self._num_replicas,
            )
        self._find_groups()
        self.replicas = replica_values.ReplicaValues(
            strategy, self._communication()
        )

    @property
    def _parts(self) -> dict[str, Any]:
        # Each time anew: a model may have been compiled again.
        return catalog.named_parts(self._holder)

    def _find_groups(self) -> None:
        self._groups = self._given_groups or catalog.groups_of(
            self._parts, self._num_replicas
        )

    @property
    def group_assignment(self) -> group_assignment_lib.GroupAssignment:
        """Which replicas are in which group."""
        return self._groups

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return self._groups.num_groups

    def group_of(self, replica_id: int) -> int:
        """The group that a replica is in."""
        return self._groups.group_of(replica_id)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what is written once."""
        return self.replicas.process_id == 0

    def _strategy(self) -> tf.distribute.Strategy:
        found = {
            id(strategy): strategy
            for one in catalog.listed(self._parts)
            if (strategy := replica_variables.strategy_of(one.variable))
        }
        for optimizer in catalog.optimizers_in(self._parts):
            if not replica_context.is_default(optimizer._distribution_strategy):
                own = optimizer._distribution_strategy
                found[id(own)] = own
        if len(found) > 1:
            raise ValueError(
                f"GroupState got variables of {len(found)} strategies,"
                f" {[type(one).__name__ for one in found.values()]}. Make all"
                " in the scope of one."
            )
        for strategy in found.values():
            return strategy
        if self._model is not None:
            return self._model.distribute_strategy
        return tf.distribute.get_strategy()

    def _communication(self) -> communication_lib.Communication:
        for one in catalog.optimizers_in(self._parts):
            if hasattr(one, "communication"):
                return one.communication
        return communication_lib.Communication()

    def listed(
        self, kinds=None, each_once: bool = True
    ) -> list[catalog.StateVariable]:
        """All variables, or those of some kinds."""
        replica_context.refuse_replica_context("GroupState")
        if not tf.executing_eagerly():
            raise RuntimeError(
                "GroupState is used inside a tf.function. Call it outside."
            )
        parts = self._parts
        self._build(parts)
        self._find_groups()
        found = catalog.listed(parts, each_once)
        if not found:
            raise ValueError(f"GroupState found no variables in {list(parts)}.")
        return [one for one in found if kinds is None or one.kind in kinds]

    def optimizer_classes(self) -> dict[str, list[str]]:
        """The classes of each optimizer and of those inside it, by parts."""
        return {
            name: [
                type(one).__name__
                for one in catalog.optimizers_in({name: part})
            ]
            for name, part in self._parts.items()
            if catalog.optimizers_in({name: part})
        }

    def _build(self, parts) -> None:
        """Makes what is not there yet, as far as that is known."""
        for name, part in parts.items():
            is_built = getattr(part, "built", True)
            if isinstance(part, keras.Layer) and not is_built:
                raise ValueError(
                    f"GroupState: {name!r} has not been built, so it has no"
                    " variables. Give it an Input, or call it on a batch first."
                )
            if not isinstance(part, keras.optimizers.Optimizer) or is_built:
                continue
            if self._model is None or name != "optimizer":
                raise ValueError(
                    f"GroupState: the optimizer {name!r} has not been built."
                    " Call build(variables) on it, in the strategy's scope."
                )
            with self.replicas.strategy.scope():
                part.build(self._model.trainable_variables)

    def _checked(self, group: int) -> int:
        if (
            isinstance(group, bool)
            or not isinstance(group, (int, np.integer))
            or not 0 <= group < self.num_groups
        ):
            raise ValueError(
                f"group must be an int from 0 to {self.num_groups - 1}, got"
                f" {group!r}: the groups are {self._groups.to_list()}."
            )
        return int(group)

    # One value per group.

    def _shown(self, listed) -> list:
        """The variables that hold a group's value: of AGN's, the center."""
        center = {}
        for one in catalog.agn_optimizers(self._parts):
            if not one.center_is_shown:
                for variable, its in zip(
                    one._trainable_variables, one.center_variables, strict=True
                ):
                    center[id(variable)] = its
        return [center.get(id(one.variable), one.variable) for one in listed]

    def _group_values(self, variables, group: int) -> list[np.ndarray]:
        members = self._groups.to_list()[group]
        return [
            combine.combined(values)
            for values in self.replicas.of_replicas(variables, members)
        ]

    def assign_groups(self, variable, of_group: Mapping[int, Any]) -> None:
        """Writes a value to all replicas of some groups."""
        own = [self._groups.group_of(r) for r in self.replicas.local_ids]
        current = self.replicas.local(variable)
        self.replicas.assign(
            variable,
            [
                of_group.get(group, value)
                for group, value in zip(own, current, strict=True)
            ],
        )

    def get_weights(self, group: int) -> dict[str, list[np.ndarray]]:
        """What a group has learned.

        Args:
          group: The group's index.

        Returns:
          A list of arrays for each part: `"model"`, in the order of
          `model.get_weights()`, with BatchNormalization's moving statistics,
          and `"optimizer"`, in the order of `optimizer.variables`; or for the
          names that this was made with.

        Raises:
          ValueError: If there is no such group, or something is not built.

        Example:

        >>> state = tf_xshard.GroupState([keras.Variable([1.0, 2.0])])
        >>> state.get_weights(0)
        {'variables': [array([1., 2.], dtype=float32)]}
        """
        group = self._checked(group)
        listed = self.listed(catalog.LEARNED, each_once=False)
        result = {name: [] for name in self._parts}
        values = self._group_values(self._shown(listed), group)
        for one, value in zip(listed, values, strict=True):
            result[one.part].append(value)
        return result

    def set_weights(
        self, group: int, weights: Mapping[str, Sequence[np.ndarray]]
    ) -> None:
        """Gives all replicas of a group new values; others keep theirs.

        Args:
          group: The group's index.
          weights: As from `get_weights`; parts can be left out.

        Raises:
          ValueError: If something does not match; nothing is changed then.

        Example:

        >>> weight = keras.Variable(1.0)
        >>> state = tf_xshard.GroupState([weight])
        >>> state.set_weights(0, {"variables": [3.0]})
        >>> float(weight)
        3.0
        """
        group = self._checked(group)
        listed = self.listed(catalog.LEARNED, each_once=False)
        unknown = set(weights) - set(self._parts)
        if unknown:
            raise ValueError(
                f"set_weights got {sorted(unknown)}, and there are"
                f" {list(self._parts)}."
            )
        assignments = []
        for part, values in weights.items():
            own = [one for one in listed if one.part == part]
            if len(own) != len(values):
                raise ValueError(
                    f"{part!r} has {len(own)} variables, got"
                    f" {len(values)} values."
                )
            for one, variable, value in zip(
                own, self._shown(own), values, strict=True
            ):
                value = combine.as_type(value, one.numpy_type, one.name)
                if value.shape != one.shape:
                    raise ValueError(
                        f"{one.name!r} has shape {one.shape}, got a value of"
                        f" shape {value.shape}."
                    )
                assignments.append((one.variable, value))
                # AGN's workers go on from the center.
                if variable is not one.variable:
                    assignments.append((variable, value))
        # What is given of the optimizer, the center included, counts.
        for variable, value in assignments:
            self.assign_groups(variable, {group: value})

    def assign(self, variable, values: Sequence) -> None:
        """Gives each group its own value of one variable.

        Such as the learning rate: `state.assign(optimizer.learning_rate,
        [0.1, 0.03, 0.01, 0.003])` trains four groups with four rates in one
        `fit`.

        Args:
          variable: A Keras or TensorFlow variable, made in the strategy's
            scope.
          values: One value for each group.

        Raises:
          TypeError: If it is no variable (a schedule, for example).
          ValueError: If the number of values or a shape differs, or the
            variable has one copy for several groups.

        Example:

        >>> rate = keras.Variable(0.1)
        >>> tf_xshard.GroupState([rate]).assign(rate, [0.5])
        >>> float(rate)
        0.5
        """
        if not isinstance(variable, (keras.Variable, tf.Variable)):
            raise TypeError(
                f"assign() needs a variable, got {type(variable).__name__}."
            )
        dtype = replica_variables.copies(variable)[0].dtype.as_numpy_dtype
        values = [
            combine.as_type(value, dtype, variable.name) for value in values
        ]
        shape = tuple(variable.shape)
        if len(values) != self.num_groups or any(
            value.shape != shape for value in values
        ):
            raise ValueError(
                f"assign() needs {self.num_groups} values of shape {shape}, one"
                f" for each group, got shapes {[v.shape for v in values]}."
            )
        if self.num_groups > 1 and not replica_variables.strategy_of(variable):
            raise ValueError(
                f"{variable.name!r} was made outside of the strategy's scope:"
                " all replicas share one value."
            )
        self.assign_groups(variable, dict(enumerate(values)))

    def merge(self, how: str | int | Sequence[float] = "mean") -> None:
        """Makes all replicas of all groups equal.

        Weights, moving statistics, and all state of the optimizer become the
        groups' (weighted) mean; counters and random states, which have none,
        those of the group with the largest weight, else of the first.

        Args:
          how: `"mean"` (default); a group's index, whose values all take; or
            one weight for each group, not negative, which are divided by their
            sum.

        Raises:
          ValueError: If `how` is none of these.

        Example:

        >>> tf_xshard.GroupState([keras.Variable(1.0)]).merge("mean")
        """
        if isinstance(how, str):
            if how != "mean":
                raise ValueError(
                    'merge() takes "mean", a group\'s index, or one weight for'
                    f" each group, got {how!r}."
                )
            weights = None
        elif isinstance(how, (int, np.integer)):
            weights = np.eye(self.num_groups)[self._checked(how)].tolist()
        else:
            weights = np.asarray(how, np.float64)
            if (
                weights.shape != (self.num_groups,)
                or not np.isfinite(weights).all()
                or (weights < 0).any()
                or not weights.sum() > 0
            ):
                raise ValueError(
                    f"merge() needs {self.num_groups} weights, one for each"
                    f" group, finite, not negative and not all 0, got {how!r}."
                )
            weights = (weights / weights.sum()).tolist()
        listed = self.listed((*catalog.LEARNED, "random"))
        variables = [one.variable for one in listed]
        every = range(self.replicas.num_replicas)
        for variable, values in zip(
            variables, self.replicas.of_replicas(variables, every), strict=True
        ):
            of_groups = combine.by_group(values, self._groups)
            value = combine.combined(of_groups, weights)
            self.assign_groups(
                variable, dict.fromkeys(range(self.num_groups), value)
            )
