"""What users give: its variables and optimizers, found by one walk."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard.distribute import replica_variables
from tf_xshard.optimizers import inner_update
from tf_xshard.optimizers import tree


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
    def key(self) -> int:
        """Equal for two entries of one variable."""
        return id(replica_variables.tensorflow_variable(self.variable))

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


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the things that a user gave.

    Attributes:
      holder: The thing itself.
      held: What it holds at any depth, with the paths that lead there.
      optimizers: The optimizers that it is or holds, without those inside.
    """

    holder: Any
    held: tuple[tuple[str, Any], ...]
    optimizers: tuple[keras.optimizers.Optimizer, ...]


def parts_of(holder: Any) -> dict[str, Part]:
    """What a user gave, by names, each walked over once.

    Args:
      holder: A `keras.Model`, a dict of names and what holds variables, or a
        list of variables.

    Returns:
      The parts. A model's optimizers are parts of their own, by the attributes
      that lead to them.

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
            "GroupState needs a keras.Model, a dict of what holds variables,"
            f" or a list of variables, got {type(holder).__name__}."
        )
    return {name: _part(part) for name, part in parts.items()}


def _part(holder: Any) -> Part:
    found = tuple(held(holder))
    # A model's optimizers would be parts of their own.
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
    """A model's optimizers, by the attributes that lead to them.

    Several are attributes, in lists or of models inside: those of a GAN.
    """
    found = {
        path: one
        for path, one in held_by_model
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


def held(holder: Any) -> Iterator[tuple[str, Any]]:
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


def of_optimizer(optimizer: keras.optimizers.Optimizer) -> list:
    """All variables of an optimizer and of those inside it, each once."""
    # A LossScaleOptimizer or MultiOptimizer lists those below it; not all do.
    found = {
        id(v): v
        for one in tree.with_local_optimizers(optimizer)
        for v in one.variables
    }
    return list(found.values())


def variables_of(
    name: str, holder: Any, found: tuple[tuple[str, Any], ...] | None = None
) -> Iterator[StateVariable]:
    """The variables of a part, or of something in it.

    Args:
      name: The part's name.
      holder: What holds them.
      found: What it holds, if that is known already; see `Part`.

    Yields:
      A `StateVariable` for each, in a deterministic order.

    Raises:
      TypeError: If it holds no variables, or strings.
    """

    def one_of(variable: Any, kind: str) -> StateVariable:
        if replica_variables.copies(variable)[0].dtype == tf.string:
            raise TypeError(
                f"GroupState: {variable.name!r} of {name!r} holds strings,"
                " which it can't compare or save."
            )
        path = getattr(variable, "path", None) or variable.name
        return StateVariable(name, path, variable, kind)

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
            # A center has its weight's path, by which optimizers know it.
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


def _attributes(
    name: str, holder: Any, found: tuple[tuple[str, Any], ...] | None
) -> Iterator[StateVariable]:
    """TensorFlow's variables and generators in attributes, at any depth.

    Of a tf.Module everything, of Keras' layers what Keras does not list.
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
