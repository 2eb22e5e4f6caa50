"""The values of groups: read, written and merged, one per group."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.group_state import catalog as catalog_lib
from tf_xshard.group_state import combine
from tf_xshard.group_state import replica_values
from tf_xshard.group_state import state_variable


class GroupValues:
    """The part of `GroupState` that needs no model; see `GroupState`.

    Args:
      model: See `GroupState`.
      group_assignment: See `GroupState`.
    """

    def __init__(
        self,
        model: keras.Model | Mapping[str, Any] | Sequence,
        group_assignment: (
            group_assignment_lib.GroupAssignment | Sequence | np.ndarray | None
        ) = None,
    ) -> None:
        site_lib.refuse_replica_context("GroupState")
        self._holder = model
        self._given_groups = (
            None
            if group_assignment is None
            else group_assignment_lib.GroupAssignment(group_assignment)
        )
        catalog = catalog_lib.of(model, self._given_groups)
        site_lib.kind_of(catalog.strategy)
        self.replicas = replica_values.ReplicaValues(
            catalog.strategy, catalog.communication()
        )

    @property
    def group_assignment(self) -> group_assignment_lib.GroupAssignment:
        """Which replicas are in which group, as the model is compiled now."""
        return self._given_groups or catalog_lib.groups_of(
            self._holder, self.replicas.strategy
        )

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return self.group_assignment.num_groups

    def group_of(self, replica_id: int) -> int:
        """The group that a replica is in.

        Args:
          replica_id: A replica id.

        Returns:
          The group's index.
        """
        return self.group_assignment.group_of(replica_id)

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes shared files."""
        return self.replicas.rank == 0

    def catalog(self) -> catalog_lib.Catalog:
        """What the model holds now: variables, optimizers and groups.

        Returns:
          A frozen `Catalog`.

        Raises:
          RuntimeError: In replica context, or inside a `tf.function`.
          ValueError: If something has not been built, or there are no
            variables.
        """
        site_lib.refuse_replica_context("GroupState")
        if not tf.executing_eagerly():
            raise RuntimeError(
                "GroupState is used inside a tf.function. Use it outside."
            )
        catalog = catalog_lib.of(self._holder, self._given_groups)
        catalog.check_built(isinstance(self._holder, keras.Model))
        return catalog

    def _built_catalog(self) -> catalog_lib.Catalog:
        """The same, after a model's optimizer has been built."""
        catalog = self.catalog()
        if not isinstance(self._holder, keras.Model):
            return catalog
        optimizer = catalog.holders.get("optimizer")
        if optimizer is None or optimizer.built:
            return catalog
        with self.replicas.strategy.scope():
            optimizer.build(self._holder.trainable_variables)
        return self.catalog()

    def variables(
        self, kinds: Collection[str] | None = None, each_once: bool = True
    ) -> list[state_variable.StateVariable]:
        """All variables, or those of some kinds, as they are now.

        Args:
          kinds: Kinds of `StateVariable`, such as "weight", "slot" and
            "statistic". Default: None, all.
          each_once: Whether to list a variable of several parts only with the
            first. Default: True.

        Returns:
          A list of `StateVariable`, in a deterministic order.
        """
        return self.catalog().variables(kinds, each_once)

    # One value per group.

    def get_weights(self, group: int) -> dict[str, list[np.ndarray]]:
        """What a group has learned.

        Args:
          group: The group's index.

        Returns:
          A dict from parts to lists of arrays: `"model"`, in the order of
          `model.get_weights()`, with BatchNormalization's moving statistics,
          and `"optimizer"`, in the order of `optimizer.variables`; or the names
          of the dict given to the constructor.
          An optimizer that has not been built is left out.

        Raises:
          ValueError: If there is no such group, or something is not built.

        Example:

        >>> state = tf_xshard.GroupState([keras.Variable([1.0, 2.0])])
        >>> state.get_weights(0)
        {'variables': [array([1., 2.], dtype=float32)]}
        """
        catalog = self.catalog()
        members = catalog.groups.to_list()[catalog.checked_group(group)]
        variables = catalog.variables(catalog_lib.LEARNED, each_once=False)
        values = self.replicas.of_group(catalog.shown(variables), members)
        # What an unbuilt optimizer has is less than `set_weights` would need.
        result: dict[str, list] = {
            name: []
            for name, part in catalog.holders.items()
            if getattr(part, "built", True)
        }
        for one, value in zip(variables, values, strict=True):
            if one.part in result:
                result[one.part].append(value)
        return result

    def set_weights(
        self, group: int, weights: Mapping[str, Sequence[np.ndarray]]
    ) -> None:
        """Sets the values of all replicas of a group; others keep theirs.

        Args:
          group: The group's index.
          weights: As from `get_weights`; parts can be left out.

        Raises:
          ValueError: If something does not match; then nothing is changed.

        Example:

        >>> weight = keras.Variable(1.0)
        >>> state = tf_xshard.GroupState([weight])
        >>> state.set_weights(0, {"variables": [3.0]})
        >>> float(weight)
        3.0
        """
        catalog = self._built_catalog()
        group = catalog.checked_group(group)
        variables = catalog.variables(catalog_lib.LEARNED, each_once=False)
        unknown = set(weights) - set(catalog.holders)
        if unknown:
            raise ValueError(
                f"set_weights got {sorted(unknown)}, but the parts are"
                f" {list(catalog.holders)}."
            )
        assignments = []
        for part, values in weights.items():
            own = [one for one in variables if one.part == part]
            if len(own) != len(values):
                raise ValueError(
                    f"{part!r} has {len(own)} variables, got"
                    f" {len(values)} values. Pass one for each, as"
                    " get_weights(group) returns them."
                )
            for one, shown, value in zip(
                own, catalog.shown(own), values, strict=True
            ):
                value = combine.as_type(value, one.numpy_type, one.name)
                if value.shape != one.shape:
                    raise ValueError(
                        f"{one.name!r} has shape {one.shape}, got a value of"
                        f" shape {value.shape}."
                    )
                assignments.append((one.variable, value))
                # AGN's workers continue from the center.
                if shown is not one.variable:
                    assignments.append((shown, value))
        # The optimizer's given values, the center included, take precedence.
        for variable, value in assignments:
            self.replicas.assign_groups(
                variable, catalog.groups, {group: value}
            )

    def assign(self, variable: Any, values: Sequence) -> None:
        """Gives each group its own value of one variable.

        Such as the learning rate: `state.assign(optimizer.learning_rate,
        [0.1, 0.03, 0.01, 0.003])` trains four groups with four rates in one
        `fit`.

        Args:
          variable: A Keras or TensorFlow variable, created in the strategy's
            scope.
          values: One value for each group.

        Raises:
          TypeError: If it is not a variable (a schedule, for example).
          ValueError: If the number of values or a shape is wrong, or several
            groups share the variable's only copy.

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
        groups = self.group_assignment
        dtype = replica_variables.copies(variable)[0].dtype.as_numpy_dtype
        values = combine.one_per_group(
            values,
            groups.num_groups,
            dtype,
            tuple(variable.shape),
            variable.name,
        )
        if groups.num_groups > 1 and not replica_variables.strategy_of(
            variable
        ):
            raise ValueError(
                f"{variable.name!r} was created outside of the strategy's"
                " scope: all replicas share one value."
            )
        self.replicas.assign_groups(variable, groups, dict(enumerate(values)))

    def merge(self, how: str | int | Sequence[float] = "mean") -> None:
        """Makes all replicas of all groups equal.

        Weights, moving statistics, and all optimizer state become the groups'
        (weighted) mean. Counters and random states, which have no mean, become
        those of the group with the largest weight, or of the first group.

        Args:
          how: `"mean"` (default); the index of the group whose values all take;
            or one nonnegative weight for each group, which are divided by
            their sum.

        Raises:
          ValueError: If `how` is none of these.

        Example:

        >>> tf_xshard.GroupState([keras.Variable(1.0)]).merge("mean")
        """
        catalog = self._built_catalog()
        weights = combine.merge_weights(
            how, catalog.groups.num_groups, catalog.checked_group
        )
        variables = catalog.variables((*catalog_lib.LEARNED, "random"))
        every = range(self.replicas.num_replicas)
        for one, values in zip(
            variables,
            self.replicas.gather([v.variable for v in variables], every),
            strict=True,
        ):
            of_groups = combine.by_group(values, catalog.groups)
            self.replicas.assign_all(
                one.variable, combine.combined(of_groups, weights)
            )
