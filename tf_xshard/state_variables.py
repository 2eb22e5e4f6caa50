"""Which variables a training step reads, and what each of them is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import agn_optimizer
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
    def dtype(self) -> str:
        """The name of its type."""
        return replica_values.copies(self.variable)[0].dtype.name


def named_parts(holder) -> dict[str, Any]:
    """What users give, by names.

    Raises:
      TypeError: If something in it holds no variables.
    """
    if isinstance(holder, keras.Model):
        parts = {"model": holder}
        if getattr(holder, "optimizer", None) is not None:
            parts["optimizer"] = holder.optimizer
        return parts
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


def group_assignments(
    parts: Mapping[str, Any],
) -> list[group_assignment_lib.GroupAssignment | None]:
    """Those of all optimizers that reduce; None for one group of all."""
    found = [
        one.group_assignment
        for one in optimizers_in(parts)
        if hasattr(one, "group_assignment")
    ]
    # A plain Keras optimizer reduces over all replicas.
    return found or [None]


def listed(parts: Mapping[str, Any]) -> list[StateVariable]:
    """Every variable of the parts, each once, in an order that is always one.

    Args:
      parts: See `named_parts`.

    Returns:
      A list of `StateVariable`.
    """
    kinds = _kinds_from_agn(parts)
    seen, result = set(), []
    for name, part in parts.items():
        for one in _variables(name, part):
            key = id(_tensorflow_variable(one.variable))
            if key in seen:
                continue
            seen.add(key)
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
    def all_of(variables, kind):
        for variable in variables:
            path = getattr(variable, "path", None) or variable.name
            yield StateVariable(part, path, variable, kind)

    if isinstance(holder, keras.optimizers.Optimizer):
        centers = {id(v) for v in _centers(holder)}
        for one in all_of(of_optimizer(holder), "slot"):
            # A center has its weight's path, by which optimizers know it.
            name = one.name
            name = f"center/{name}" if id(one.variable) in centers else name
            kind = "local" if _is_on_read(one.variable) else "slot"
            yield dataclasses.replace(one, name=name, kind=kind)
    elif isinstance(holder, keras.Metric):
        yield from all_of(holder.variables, "metric")
    elif isinstance(holder, keras.Layer):
        weights = {id(v) for v in holder.weights}
        for one in all_of(holder.weights, "weight"):
            is_statistic = not one.variable.trainable or (
                inner_update.is_overwritten(one.variable)
            )
            yield dataclasses.replace(
                one, kind="statistic" if is_statistic else "weight"
            )
        yield from all_of(
            (v for v in holder.variables if id(v) not in weights), "random"
        )
        yield from all_of(holder.metrics_variables, "metric")
    elif isinstance(holder, keras.random.SeedGenerator):
        yield from all_of([holder.state], "random")
    elif isinstance(holder, tf.random.Generator):
        yield from all_of([holder.state], "random")
    elif isinstance(holder, (tf.Variable, keras.Variable)):
        kind = "weight" if holder.trainable else "statistic"
        kind = "local" if _is_on_read(holder) else kind
        yield from all_of([holder], kind)
    elif isinstance(holder, tf.Module):
        for variable in holder.variables:
            yield from _variables(part, variable)
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


def _is_on_read(variable) -> bool:
    synchronization = _tensorflow_variable(variable).synchronization
    return synchronization == tf.VariableSynchronization.ON_READ


def _tensorflow_variable(variable):
    return variable.value if isinstance(variable, keras.Variable) else variable
