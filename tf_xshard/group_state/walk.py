"""Finds the variables and optimizers of what users give, in one walk."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.distribute import replica_variables
from tf_xshard.group_state import state_variable
from tf_xshard.optimizers import inner_update
from tf_xshard.optimizers import tree


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the objects that a user gave.

    Attributes:
      holder: The object itself.
      held: What it holds at any depth, with paths.
      optimizers: The optimizers that it is or holds, without nested ones.
    """

    holder: Any
    held: tuple[tuple[str, Any], ...]
    optimizers: tuple[keras.optimizers.Optimizer, ...]


def parts_of(holder: Any) -> dict[str, Part]:
    """What a user gave, by names, each walked over once.

    Args:
      holder: A `keras.Model`, a dict from names to objects that hold variables,
        or a list of variables.

    Returns:
      The parts. A model's optimizers are separate parts, named by attribute
      path.

    Raises:
      TypeError: If it is none of these.
    """
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
            "GroupState needs a keras.Model, a dict of variable holders, or a"
            f" list of variables, got {type(holder).__name__}."
        )
    return {name: _part(part) for name, part in parts.items()}


def _part(holder: Any) -> Part:
    found = tuple(held(holder))
    # A model's optimizers would be separate parts.
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
    """A model's optimizers, by attribute path.

    There may be several, in attributes, lists or nested models, as in a GAN.
    """
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
    """What an object holds in attributes, lists and dicts, at any depth.

    Does not descend into optimizers, metrics, variables and random generators.

    Yields:
      Pairs of a path, such as `"critics[1].optimizer"`, and an object, once
      for each object, with its shortest path.
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
                    # The user's names come before Keras' own lists.
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
    """All variables of an optimizer and of nested ones, each once."""
    # Only some optimizers list the variables of nested ones.
    found = {
        id(v): v
        for one in tree.with_local_optimizers(optimizer)
        for v in one.variables
    }
    return list(found.values())


def variables_of(
    name: str, holder: Any, found: tuple[tuple[str, Any], ...] | None = None
) -> Iterator[state_variable.StateVariable]:
    """The variables of a part, or of an object in it.

    Args:
      name: The part's name.
      holder: The object that holds them.
      found: What it holds, if already known; see `Part`.

    Yields:
      A `StateVariable` for each, in a deterministic order.

    Raises:
      TypeError: If it holds no variables, or strings.
    """

    def one_of(variable: Any, kind: str) -> state_variable.StateVariable:
        if replica_variables.copies(variable)[0].dtype == tf.string:
            raise TypeError(
                f"GroupState: {variable.name!r} of {name!r} holds strings,"
                " which can't be compared or saved."
            )
        path = getattr(variable, "path", None) or variable.name
        return state_variable.StateVariable(name, path, variable, kind)

    if isinstance(holder, keras.optimizers.Optimizer):
        centers = {
            id(v)
            for one in tree.with_local_optimizers(holder)
            for v in getattr(one, "center_variables", ())
        }
        for variable in of_optimizer(holder):
            kind = "local" if _is_on_read(variable) else "slot"
            entry = dataclasses.replace(
                one_of(variable, kind), of_optimizer=True
            )
            # A center has the path of its weight, as optimizers expect.
            if id(variable) in centers:
                entry = dataclasses.replace(entry, name=f"center/{entry.name}")
            yield entry
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
        yield from _attributes(name, holder, found)
    elif isinstance(holder, keras.random.SeedGenerator):
        yield one_of(holder.state, "random")
    elif isinstance(holder, tf.random.Generator):
        yield one_of(holder.state, "random")
    elif isinstance(holder, (tf.Variable, keras.Variable)):
        kind = "weight" if holder.trainable else "statistic"
        yield one_of(holder, "local" if _is_on_read(holder) else kind)
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
# Objects that are listed, or not, as a whole.
_WHOLE = (
    *_HOLDERS,
    keras.Variable,
    keras.optimizers.Optimizer,
    keras.Metric,
)


def _attributes(
    name: str, holder: Any, found: tuple[tuple[str, Any], ...] | None
) -> Iterator[state_variable.StateVariable]:
    """TensorFlow's variables and generators in attributes, at any depth.

    For a tf.Module everything, for Keras layers what Keras does not list.
    """
    wanted: tuple = _HOLDERS
    if not isinstance(holder, keras.Layer):
        wanted = (*_WHOLE, keras.Layer)
    for _, one in held(holder) if found is None else found:
        if isinstance(one, wanted):
            yield from variables_of(name, one)


def _is_on_read(variable: Any) -> bool:
    synchronization = replica_variables.tensorflow_variable(
        variable
    ).synchronization
    return synchronization == tf.VariableSynchronization.ON_READ
