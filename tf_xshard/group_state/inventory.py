"""Finds the variables, optimizers and groups that a model has now."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import checks
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.distribute import variable_role
from tf_xshard.optimizers import saving
from tf_xshard.optimizers import stack
from tf_xshard.private.keras import optimizer_state


@dataclasses.dataclass(frozen=True)
class StateVariable:
    """Describes a variable of the state.

    Attributes:
      part: The part that holds the variable, `"model"`, `"optimizer"`, or a
        name that the user gave.
      name: The variable's path.
      variable: A Keras or TensorFlow variable.
      kind: `"weight"`, `"slot"`, `"center"`, `"local"`, `"statistic"`,
        `"random"` or `"metric"`. AGNOptimizer has centers. A replica's own
        state is local: variables that AGNOptimizer trains, open rounds of
        towers, counters. A statistic is untrained state that Keras lets differ
        by replica. A generator's state is random.
      of_optimizer: Whether an optimizer holds the variable. Its name then
        contains another variable's name.
    """

    part: str
    name: str
    variable: Any
    kind: str
    of_optimizer: bool = False

    @property
    def key(self) -> int:
        """A key that all entries of one variable share."""
        return replica_variables.key(self.variable)

    @property
    def may_be_missing(self) -> bool:
        """True if a save may lack the variable, which is then 0."""
        return self.of_optimizer and saving.is_optional(self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The variable's shape."""
        return tuple(int(n) for n in self.variable.shape)

    @property
    def numpy_type(self) -> np.dtype:
        """The variable's NumPy dtype."""
        dtype = replica_variables.copies(self.variable)[0].dtype
        return np.dtype(dtype.as_numpy_dtype)

    @property
    def dtype(self) -> str:
        """The name of the variable's dtype."""
        return replica_variables.copies(self.variable)[0].dtype.name


@dataclasses.dataclass(frozen=True)
class Part:
    """Holds an object that a user gave, with everything in it."""

    holder: Any
    # Paths and objects, at any depth.
    held: tuple[tuple[str, Any], ...]
    # The optimizers that the holder is or holds, without inner optimizers.
    optimizers: tuple[keras.optimizers.Optimizer, ...]


def parts_of(holder: Any) -> dict[str, Part]:
    """Walks once over each object that a user gave, and names the parts."""
    if isinstance(holder, keras.Model):
        found = tuple(held(holder))
        return {
            "model": Part(holder, found, ()),
            **{
                path: Part(one, (), (one,))
                for path, one in _optimizers_of(found).items()
            },
        }
    if isinstance(holder, Mapping):
        parts = {str(name): part for name, part in holder.items()}
    elif isinstance(holder, (list, tuple)):
        parts = {"variables": list(holder)}
    else:
        raise TypeError(
            "GroupState needs a keras.Model, a dict of objects that hold"
            f" variables, or a list of variables, got {type(holder).__name__}."
        )
    return {name: _part(part) for name, part in parts.items()}


def _part(holder: Any) -> Part:
    found = tuple(held(holder))
    # A model's optimizers are separate parts.
    optimizers = [
        one
        for one in (holder, *(one for _, one in found))
        if isinstance(one, keras.optimizers.Optimizer)
        and not isinstance(holder, keras.Layer)
    ]
    return Part(holder, found, tuple(optimizers))


def _optimizers_of(
    held_by_model: tuple[tuple[str, Any], ...],
) -> dict[str, keras.optimizers.Optimizer]:
    """Returns the optimizers that a model uses, by attribute path."""
    # A model such as a GAN may have several optimizers, in attributes, lists or
    # nested models.
    found = {
        path: one
        for path, one in held_by_model
        if isinstance(one, keras.optimizers.Optimizer)
    }
    # Keras creates an unused optimizer if `compile` gets none. Nested models
    # are often compiled but trained by another optimizer.
    of_models_inside = {path for path in found if path.endswith(".optimizer")}
    unused = of_models_inside | (
        {"optimizer"} if len(found) - len(of_models_inside) > 1 else set()
    )
    return {
        path: one
        for path, one in found.items()
        if one.built or path not in unused
    }


def held(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yields the path and value of everything in an object, at any depth."""
    waiting, seen = [("", holder)], set()
    for path, one in waiting:
        if id(one) in seen:
            continue
        seen.add(id(one))
        if path:
            yield path, one
        if isinstance(one, _WHOLE):
            continue
        if isinstance(one, (keras.Layer, tf.Module)):
            waiting += [
                (f"{path}.{name}" if path else name, value)
                for name, value in sorted(
                    # The user's names come before Keras's own lists.
                    vars(one).items(),
                    key=lambda item: item[0].startswith("_"),
                )
            ]
        elif isinstance(one, (list, tuple)):
            waiting += [(f"{path}[{i}]", value) for i, value in enumerate(one)]
        elif isinstance(one, Mapping):
            waiting += [
                (f"{path}[{name!r}]", value) for name, value in one.items()
            ]


def of_optimizer(optimizer: keras.optimizers.Optimizer) -> list:
    """Lists once each variable of an optimizer and its nested optimizers."""
    # Only some optimizers list the variables of nested optimizers.
    found = {
        id(v): v
        for one in stack.with_local_optimizers(optimizer)
        for v in one.variables
    }
    return list(found.values())


def variables_of(
    name: str, holder: Any, found: tuple[tuple[str, Any], ...] | None = None
) -> Iterator[StateVariable]:
    """Yields the variables of a part, or of an object in the part."""

    def one_of(variable: Any, kind: str) -> StateVariable:
        if replica_variables.copies(variable)[0].dtype == tf.string:
            raise TypeError(
                f"GroupState: {variable.name!r} of {name!r} holds strings,"
                " which can't be compared or saved. Pass a dict of objects"
                " without string variables."
            )
        path = getattr(variable, "path", None) or variable.name
        return StateVariable(name, path, variable, kind)

    if isinstance(holder, keras.optimizers.Optimizer):
        centers = {
            id(v)
            for one in stack.with_local_optimizers(holder)
            for v in getattr(one, "center_variables", ())
        }
        for variable in of_optimizer(holder):
            is_local = variable_role.role_of(variable) is variable_role.LOCAL
            kind = "local" if is_local else "slot"
            entry = dataclasses.replace(
                one_of(variable, kind), of_optimizer=True
            )
            # A center has its weight's path, as optimizers expect.
            if id(variable) in centers:
                entry = dataclasses.replace(entry, name=f"center/{entry.name}")
            yield entry
    elif isinstance(holder, keras.Metric):
        yield from (one_of(variable, "metric") for variable in holder.variables)
    elif isinstance(holder, keras.Layer):
        for variable in holder.weights:
            is_weight = variable.trainable and (
                variable_role.role_of(variable).has_loss_gradient
            )
            yield one_of(variable, "weight" if is_weight else "statistic")
        weights = {id(v) for v in holder.weights}
        for variable in holder.variables:
            if id(variable) not in weights:
                yield one_of(variable, "random")
        for variable in holder.metrics_variables:
            yield one_of(variable, "metric")
        yield from _attributes(name, holder, found)
    elif isinstance(holder, keras.random.SeedGenerator):
        yield one_of(holder.state, "random")
    elif isinstance(holder, tf.random.Generator):
        yield one_of(holder.state, "random")
    elif isinstance(holder, (tf.Variable, keras.Variable)):
        yield one_of(holder, variable_role.kind_of_state(holder))
    elif isinstance(holder, tf.Module):
        yield from _attributes(name, holder, found)
    elif isinstance(holder, (list, tuple)):
        for one in holder:
            yield from variables_of(name, one)
    else:
        raise TypeError(
            f"GroupState got {holder!r} ({type(holder).__name__}) as {name!r},"
            " which holds no variables. It takes Keras models, layers,"
            " optimizers, metrics and variables, tf.Variable, tf.Module,"
            " random number generators, and lists of these."
        )


# State that Keras does not list among a layer's variables.
_HOLDERS = (tf.Variable, tf.random.Generator, keras.random.SeedGenerator)
# The walk lists these objects as a whole, and does not descend into them.
_WHOLE = (
    *_HOLDERS,
    keras.Variable,
    keras.optimizers.Optimizer,
    keras.Metric,
)


def _attributes(
    name: str, holder: Any, found: tuple[tuple[str, Any], ...] | None
) -> Iterator[StateVariable]:
    """Yields all state of a tf.Module, or a layer's state that Keras omits."""
    wanted: tuple = _HOLDERS
    if not isinstance(holder, keras.Layer):
        wanted = (*_WHOLE, keras.Layer)
    for _, one in held(holder) if found is None else found:
        if isinstance(one, wanted):
            yield from variables_of(name, one)


def _joined_groups(
    optimizers: Mapping[str, Sequence], num_replicas: int, where: str
) -> group_assignment_lib.GroupAssignment:
    """Returns the groups that a model's nested optimizers make together."""
    given = _given(one for of_part in optimizers.values() for one in of_part)
    found = {}
    for name, of_part in optimizers.items():
        assignments = [
            group_assignment_lib.for_replicas(
                given[id(one)], num_replicas, where
            )
            for one in of_part
            if id(one) in given
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
            " group_assignment, or create one GroupState for each optimizer."
        )
    return first


def _given(
    optimizers: Iterable,
) -> dict[int, group_assignment_lib.GroupAssignment | None]:
    """Returns the groups of every optimizer that reduces, by its id."""
    held = list(optimizers)
    inside = {
        id(one)
        for optimizer in held
        for one in stack.with_local_optimizers(optimizer)
        if one is not optimizer
    }
    return {
        id(one): groups
        for optimizer in held
        if id(optimizer) not in inside
        for outermost in stack.outermost_wrappers(optimizer)
        for one, groups in stack.StackPlan(outermost).reducing
    }


# These kinds are equal on all replicas of one group, unless there is an error.
EQUAL_IN_A_GROUP = ("weight", "slot", "center")
# Training learns these kinds of state; a step only uses the other kinds.
LEARNED = (*EQUAL_IN_A_GROUP, "local", "statistic")

Optimizers = tuple[keras.optimizers.Optimizer, ...]


@dataclasses.dataclass(frozen=True)
class Catalog:
    """Holds a snapshot of everything in a model or another user's object.

    Attributes:
      holders: The user's objects, by the names of parts. A model's optimizers
        are separate parts.
      optimizers: Each part's optimizers, including nested optimizers.
      strategy: The strategy of the variables.
      groups: The group assignment of the replicas.
      entries: Every variable of every part, in a deterministic order. A
        variable that two parts hold is listed twice.
      centers: The center of each local variable that AGNOptimizer trains, by
        the local variable's id.
      local_to_an_optimizer: The keys of variables that an optimizer trains on
        each replica separately.
    """

    holders: Mapping[str, Any]
    optimizers: Mapping[str, Optimizers]
    strategy: tf.distribute.Strategy
    groups: group_assignment_lib.GroupAssignment
    entries: tuple[StateVariable, ...]
    centers: Mapping[int, Any]
    local_to_an_optimizer: frozenset[int]

    def variables(
        self, kinds: Collection[str] | None = None, each_once: bool = True
    ) -> list[StateVariable]:
        """See `GroupState.variables`."""
        seen: set[int] = set()
        result = []
        for one in self.entries:
            if each_once and one.key in seen:
                continue
            seen.add(one.key)
            if kinds is None or one.kind in kinds:
                result.append(one)
        return result

    def shown(self, variables: Sequence[StateVariable]) -> list:
        """Replaces the local variables that AGN trains by their centers."""
        return [
            self.centers.get(id(one.variable), one.variable)
            for one in variables
        ]

    def checked_group(self, group: Any) -> int:
        """Returns a group's index as an int, or raises ValueError."""
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
        """Raises ValueError if a part is not built or has no variables."""
        for name, part in self.holders.items():
            if getattr(part, "built", True):
                continue
            if isinstance(part, keras.Layer):
                raise ValueError(
                    f"GroupState: {name!r} has not been built, so it has no"
                    " variables. Give it an Input, or call it on a batch"
                    " first."
                )
            # A model's own optimizer can be built later.
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

    def refuse_local_weights(self, what: str) -> None:
        """Raises ValueError if a group's replicas have local variables."""
        local = [
            one.name
            for one in self.entries
            if one.key in self.local_to_an_optimizer
            and not one.of_optimizer
            and id(one.variable) not in self.centers
        ]
        if local and self.groups.group_size > 1:
            alone = [[r] for r in range(self.groups.num_replicas)]
            raise ValueError(
                f"GroupState.{what}: {local[0]!r} is a local variable, so each"
                " replica of a group has its own value. Make each replica a"
                f" group: GroupState(model, {alone})."
            )

    def communication(self) -> communication_lib.Communication:
        """Returns the first optimizer's `Communication`, or the default."""
        for found in self.optimizers.values():
            for one in found:
                if hasattr(one, "communication"):
                    return one.communication
        return communication_lib.Communication()

    def optimizer_classes(self) -> dict[str, list[str]]:
        """Names the classes of each part's optimizers, at any depth."""
        return {
            name: [type(one).__name__ for one in found]
            for name, found in self.optimizers.items()
            if found
        }


def of(
    holder: Any,
    groups: group_assignment_lib.GroupAssignment | None = None,
) -> Catalog:
    """Makes a catalog of an object of the user, without changing the object."""
    if checks.is_of_tf_keras(holder):
        raise TypeError(
            f"GroupState takes a model of Keras 3, got tf_keras's"
            f" {type(holder).__name__}. Pass a dict of its variables."
        )
    # Each call of `GroupState` makes a new catalog, since the model may have
    # been compiled again.
    parts, optimizers = _walked(holder)
    kinds: dict[int, str] = {}
    centers: dict[int, Any] = {}
    for found in optimizers.values():
        for one in found:
            if stack.is_wrapper(one) and one.built:
                kinds.update(one._kinds_of_state())
                centers.update(one._centers_by_variable())
    entries = tuple(_entries(parts, kinds))
    strategy = _strategy(holder, entries, optimizers)
    where = f"the strategy {type(strategy).__name__}"
    num_replicas = strategy.num_replicas_in_sync
    if groups is None:
        groups = _joined_groups(optimizers, num_replicas, where)
    return Catalog(
        holders={name: part.holder for name, part in parts.items()},
        optimizers=optimizers,
        strategy=strategy,
        groups=group_assignment_lib.for_replicas(groups, num_replicas, where),
        entries=entries,
        centers=centers,
        local_to_an_optimizer=frozenset(
            key for key, kind in kinds.items() if kind == "local"
        ),
    )


def groups_of(
    holder: Any, strategy: tf.distribute.Strategy
) -> group_assignment_lib.GroupAssignment:
    """Returns the groups of an object's optimizers, without a catalog."""
    return _joined_groups(
        _walked(holder)[1],
        strategy.num_replicas_in_sync,
        f"the strategy {type(strategy).__name__}",
    )


def _walked(
    holder: Any,
) -> tuple[dict[str, Part], dict[str, Optimizers]]:
    """Returns the parts, and each part's optimizers at any depth."""
    parts = parts_of(holder)
    return parts, {
        name: tuple(
            one
            for optimizer in part.optimizers
            for one in stack.with_local_optimizers(optimizer)
        )
        for name, part in parts.items()
    }


def _entries(
    parts: Mapping[str, Part], kinds: Mapping[int, str]
) -> Iterator[StateVariable]:
    for name, part in parts.items():
        seen: set[int] = set()
        for one in variables_of(name, part.holder, part.held):
            if one.key in seen:
                continue
            seen.add(one.key)
            if one.key in kinds:
                one = dataclasses.replace(one, kind=kinds[one.key])
            yield one


def _strategy(
    holder: Any,
    entries: Sequence[StateVariable],
    optimizers: Mapping[str, Optimizers],
) -> tf.distribute.Strategy:
    """Returns the strategy of all variables and optimizers."""
    found = [replica_variables.strategy_of(one.variable) for one in entries]
    found += [
        optimizer_state.strategy_of(one)
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
