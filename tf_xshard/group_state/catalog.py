"""Which variables a training step reads, and what each of them is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import replica_variables
from tf_xshard.optimizers import agn_optimizer
from tf_xshard.optimizers import cross_shard_optimizer
from tf_xshard.optimizers import inner_update
from tf_xshard.optimizers import tree

# What replicas of one group hold alike, unless something is wrong.
EQUAL_IN_A_GROUP = ("weight", "slot", "center")
# What is learned, as against what a step only uses.
LEARNED = (*EQUAL_IN_A_GROUP, "local", "statistic")


@dataclasses.dataclass(frozen=True)
class StateVariable:
    """One variable of the state.

    Attributes:
      part: What it is a part of: `"model"`, `"optimizer"`, or the name that the
        user gave.
      name: Its path.
      variable: A Keras or TensorFlow variable.
      kind: `"weight"`; `"slot"`, of an optimizer; `"center"`, of AGNOptimizer;
        `"local"`: a replica's own (what AGN trains, open rounds of towers,
        counters); `"statistic"`: not trained, which Keras lets differ by
        replica; `"random"`: a generator's state; `"metric"`.
      of_optimizer: Whether it is an optimizer's, so that its name has that of
        another variable in it.
    """

    part: str
    name: str
    variable: Any
    kind: str
    of_optimizer: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(int(n) for n in self.variable.shape)

    @property
    def numpy_type(self) -> np.dtype:
        """Its type in NumPy."""
        dtype = replica_variables.copies(self.variable)[0].dtype
        return np.dtype(dtype.as_numpy_dtype)

    @property
    def dtype(self) -> str:
        """The name of its type."""
        return replica_variables.copies(self.variable)[0].dtype.name


def named_parts(holder) -> dict[str, Any]:
    """What users give, by names.

    Raises:
      TypeError: If something in it holds no variables.
    """
    if isinstance(holder, keras.Model):
        return {"model": holder, **_optimizers_of(holder)}
    if isinstance(holder, Mapping):
        parts = {str(name): part for name, part in holder.items()}
    elif isinstance(holder, (list, tuple)):
        parts = {"variables": list(holder)}
    else:
        raise TypeError(
            "GroupState needs a keras.Model, a dict of what holds variables,"
            f" or a list of variables, got {type(holder).__name__}."
        )
    for name, part in parts.items():
        list(_variables(name, part))
    return parts


def _optimizers_of(model: keras.Model) -> dict[str, Any]:
    """A model's optimizers, by the attributes that lead to them.

    Several are attributes, in lists or of models inside: those of a GAN.
    """
    found = {
        path: one
        for path, one in _held(model)
        if isinstance(one, keras.optimizers.Optimizer)
    }
    # Keras makes one that nothing uses where `compile` gets none. Models inside
    # are often compiled and then trained by another.
    of_models_inside = {path for path in found if path.endswith(".optimizer")}
    unused = of_models_inside | (
        {"optimizer"} if len(found) - len(of_models_inside) > 1 else set()
    )
    return {
        path: one
        for path, one in found.items()
        if one.built or path not in unused
    }


def _held(holder) -> Iterator[tuple[str, Any]]:
    """What an object holds in attributes, lists and dicts, at any depth.

    Optimizers, metrics and what holds a variable are not looked into.

    Yields:
      Pairs of a path, such as `"critics[1].optimizer"`, and an object; the
      shortest path to each comes first, and is the only one.
    """
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
                    # Names that users give before Keras' own lists.
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


def optimizers_in(parts: Mapping[str, Any]) -> list[keras.optimizers.Optimizer]:
    """All optimizers of the parts, inner ones included."""
    return [
        one
        for part in parts.values()
        # A model's are parts of their own.
        if not isinstance(part, keras.Layer)
        for optimizer in [part, *(one for _, one in _held(part))]
        if isinstance(optimizer, keras.optimizers.Optimizer)
        for one in _all_optimizers(optimizer)
    ]


def _all_optimizers(optimizer) -> Iterator[keras.optimizers.Optimizer]:
    for one in tree.descendants(optimizer):
        yield one
        if isinstance(one, agn_optimizer.AGNOptimizer):
            yield from tree.descendants(one.local_optimizer)


def agn_optimizers(
    parts: Mapping[str, Any],
) -> list[agn_optimizer.AGNOptimizer]:
    """Those that train each replica's own variables."""
    return [
        one
        for one in optimizers_in(parts)
        if isinstance(one, agn_optimizer.AGNOptimizer) and one.built
    ]


def groups_of(
    parts: Mapping[str, Any], num_replicas: int
) -> group_assignment_lib.GroupAssignment:
    """The groups that the parts' optimizers make in the end.

    Raises:
      ValueError: If two optimizers make different ones.
    """
    found = {}
    for name, part in parts.items():
        assignments = [
            cross_shard_optimizer.groups_for(one.group_assignment, num_replicas)
            for one in optimizers_in({name: part})
            if hasattr(one, "group_assignment")
        ]
        if assignments:
            found[name] = group_assignment_lib.joined(assignments)
    # A plain Keras optimizer reduces over all replicas.
    first, *others = found.values() or [
        cross_shard_optimizer.groups_for(None, num_replicas)
    ]
    if not all(
        group_assignment_lib.same_groups(first, other) for other in others
    ):
        raise ValueError(
            "GroupState: optimizers have different groups,"
            f" { {n: g.to_list() for n, g in found.items()} }. Give"
            " group_assignment, or make one GroupState for each."
        )
    return first


def listed(
    parts: Mapping[str, Any], each_once: bool = True
) -> list[StateVariable]:
    """Every variable of the parts, in an order that is always one.

    Args:
      parts: See `named_parts`.
      each_once: Whether one of several parts is listed with the first only.

    Returns:
      A list of `StateVariable`.
    """
    kinds = _kinds_from_agn(parts)
    seen, result = set(), []
    for name, part in parts.items():
        for one in _variables(name, part):
            key = id(replica_variables.tensorflow_variable(one.variable))
            if (key if each_once else (name, key)) in seen:
                continue
            seen.add(key if each_once else (name, key))
            if key in kinds:
                one = dataclasses.replace(one, kind=kinds[key])
            result.append(one)
    return result


def _kinds_from_agn(parts) -> dict[int, str]:
    """What AGNOptimizer has, and trains, by the ids of variables."""
    result = {}
    for one in agn_optimizers(parts):
        local, center = one._trainable_variables, one.center_variables
        if one.center_is_shown:
            local, center = center, local
        for kind, variables in (
            ("local", [*local, *of_optimizer(one.local_optimizer)]),
            ("center", center),
        ):
            for variable in variables:
                result[id(replica_variables.tensorflow_variable(variable))] = (
                    kind
                )
    return result


def _centers(optimizer) -> list[keras.Variable]:
    return [
        variable
        for one in _all_optimizers(optimizer)
        if isinstance(one, agn_optimizer.AGNOptimizer)
        for variable in one.center_variables
    ]


def of_optimizer(optimizer) -> list:
    """All variables of an optimizer and of those inside it, each once."""
    # A LossScaleOptimizer or MultiOptimizer lists those below it; not all do.
    found = {
        id(v): v for one in _all_optimizers(optimizer) for v in one.variables
    }
    return list(found.values())


def _variables(part: str, holder) -> Iterator[StateVariable]:
    def one_of(variable, kind):
        if replica_variables.copies(variable)[0].dtype == tf.string:
            raise TypeError(
                f"GroupState: {variable.name!r} of {part!r} holds strings,"
                " which it can't compare or save."
            )
        path = getattr(variable, "path", None) or variable.name
        return StateVariable(part, path, variable, kind)

    if isinstance(holder, keras.optimizers.Optimizer):
        centers = {id(v) for v in _centers(holder)}
        for variable in of_optimizer(holder):
            kind = "local" if _is_on_read(variable) else "slot"
            one = dataclasses.replace(one_of(variable, kind), of_optimizer=True)
            # A center has its weight's path, by which optimizers know it.
            if id(variable) in centers:
                one = dataclasses.replace(one, name=f"center/{one.name}")
            yield one
    elif isinstance(holder, keras.Metric):
        yield from (one_of(variable, "metric") for variable in holder.variables)
    elif isinstance(holder, keras.Layer):
        for variable in holder.weights:
            is_statistic = not variable.trainable or (
                inner_update.is_overwritten(variable)
            )
            yield one_of(variable, "statistic" if is_statistic else "weight")
        weights = {id(v) for v in holder.weights}
        for variable in holder.variables:
            if id(variable) not in weights:
                yield one_of(variable, "random")
        for variable in holder.metrics_variables:
            yield one_of(variable, "metric")
        yield from _attributes(part, holder)
    elif isinstance(holder, keras.random.SeedGenerator):
        yield one_of(holder.state, "random")
    elif isinstance(holder, tf.random.Generator):
        yield one_of(holder.state, "random")
    elif isinstance(holder, (tf.Variable, keras.Variable)):
        kind = "weight" if holder.trainable else "statistic"
        yield one_of(holder, "local" if _is_on_read(holder) else kind)
    elif isinstance(holder, tf.Module):
        yield from _attributes(part, holder)
    elif isinstance(holder, (list, tuple)):
        for one in holder:
            yield from _variables(part, one)
    else:
        raise TypeError(
            f"GroupState got {holder!r} ({type(holder).__name__}) as {part!r},"
            " which holds no variables. It takes Keras models, layers,"
            " optimizers, metrics and variables, tf.Variable, tf.Module,"
            " generators of random numbers, and lists of them."
        )


# What an object may hold that Keras does not list among its variables.
_HOLDERS = (tf.Variable, tf.random.Generator, keras.random.SeedGenerator)
# What is listed, or is not, as one.
_WHOLE = (
    *_HOLDERS,
    keras.Variable,
    keras.optimizers.Optimizer,
    keras.Metric,
)


def _attributes(part: str, holder) -> Iterator[StateVariable]:
    """TensorFlow's variables and generators in attributes, at any depth.

    Of a tf.Module everything, of Keras' layers what Keras does not list.
    """
    wanted = _HOLDERS
    if not isinstance(holder, keras.Layer):
        wanted = (*_WHOLE, keras.Layer)
    for _, one in _held(holder):
        if isinstance(one, wanted):
            yield from _variables(part, one)


def _is_on_read(variable) -> bool:
    synchronization = replica_variables.tensorflow_variable(
        variable
    ).synchronization
    return synchronization == tf.VariableSynchronization.ON_READ
