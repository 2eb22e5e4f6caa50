"""Which variables a training step reads, and what each of them is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import agn_optimizer
from tf_xshard import cross_shard_optimizer
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import inner_update
from tf_xshard import replica_values

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
    """

    part: str
    name: str
    variable: Any
    kind: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(int(n) for n in self.variable.shape)

    @property
    def numpy_type(self) -> np.dtype:
        """Its type in NumPy."""
        dtype = replica_values.copies(self.variable)[0].dtype
        return np.dtype(dtype.as_numpy_dtype)

    @property
    def dtype(self) -> str:
        """The name of its type."""
        return replica_values.copies(self.variable)[0].dtype.name


def named_parts(holder) -> dict[str, Any]:
    """What users give, by names.

    Raises:
      TypeError: If something in it holds no variables.
    """
    if isinstance(holder, keras.Model):
        # Several optimizers are attributes: those of a GAN, for example.
        optimizers = {
            name: value
            for name, value in vars(holder).items()
            if isinstance(value, keras.optimizers.Optimizer)
        }
        # Keras makes one that nothing uses where `compile` gets none.
        default = optimizers.get("optimizer")
        if len(optimizers) > 1 and default and not default.built:
            del optimizers["optimizer"]
        return {"model": holder, **optimizers}
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


def optimizers_in(parts: Mapping[str, Any]) -> list[keras.optimizers.Optimizer]:
    """All optimizers of the parts, inner ones included."""
    found, holders = [], list(parts.values())
    for holder in holders:
        if isinstance(holder, keras.optimizers.Optimizer):
            found += _all_optimizers(holder)
        elif isinstance(holder, (list, tuple)):
            holders += holder
    return found


def _all_optimizers(optimizer) -> Iterator[keras.optimizers.Optimizer]:
    for one in inner_update.descendants(optimizer):
        yield one
        if isinstance(one, agn_optimizer.AGNOptimizer):
            yield from inner_update.descendants(one.local_optimizer)


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
    if any(set(other) != set(first) for other in others):
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
            key = id(_tensorflow_variable(one.variable))
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
                result[id(_tensorflow_variable(variable))] = kind
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
        if replica_values.copies(variable)[0].dtype == tf.string:
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
            one = one_of(variable, kind)
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


def _attributes(part: str, holder) -> Iterator[StateVariable]:
    """TensorFlow's variables and generators in attributes, at any depth.

    Of a tf.Module everything, of Keras' layers what Keras does not list.
    """
    waiting, seen = [holder], set()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, _HOLDERS):
            yield from _variables(part, one)
        elif isinstance(one, keras.Layer) and not isinstance(
            holder, keras.Layer
        ):
            yield from _variables(part, one)
        elif isinstance(one, keras.Variable) and not isinstance(
            holder, keras.Layer
        ):
            yield from _variables(part, one)
        elif isinstance(one, (keras.optimizers.Optimizer, keras.Metric)):
            continue
        elif isinstance(one, (keras.Layer, tf.Module)):
            waiting += vars(one).values()
        elif isinstance(one, (list, tuple)):
            waiting += one
        elif isinstance(one, dict):
            waiting += one.values()


def _is_on_read(variable) -> bool:
    synchronization = _tensorflow_variable(variable).synchronization
    return synchronization == tf.VariableSynchronization.ON_READ


def _tensorflow_variable(variable):
    return variable.value if isinstance(variable, keras.Variable) else variable
