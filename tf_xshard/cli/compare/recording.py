"""Holds the settings of a run, and its steps and data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from tf_xshard.distribute import replica_variables
from tf_xshard.private.keras import shards as keras_shards

# The status of a run.
TRAINED = "trained"
FAILED = "failed"
REFUSED = "refused"
# It trains by `fit` and has made no strategy.
NO_STRATEGY = "no strategy"
# Variables that it trains are not in float64.
OWN_DTYPE = "own dtype"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a script is run.

    Attributes:
      script: The path of the script.
      arguments: The script's own arguments.
      num_replicas: The replicas of its strategies.
      seen_replicas: What the script's code reads as `num_replicas_in_sync`.
      num_steps: After how many steps it ends.
      rows: How many rows of each batch it gets, or None for all.
      floatx: Keras's default dtype, or None for the script's own.
      default_strategy: Whether `compare` creates its MirroredStrategy.
      permuted: Whether the rows of each batch are reversed.
      cures: The names of the cures that are applied, see `cures`.
    """

    script: str
    arguments: tuple[str, ...] = ()
    num_replicas: int = 1
    seen_replicas: int = 4
    num_steps: int = 5
    rows: int | None = None
    floatx: str | None = "float64"
    default_strategy: bool = False
    permuted: bool = False
    cures: tuple[str, ...] = ()


@dataclasses.dataclass
class Value:
    """A variable on all replicas of a run.

    Attributes:
      array: Its value on replica 0.
      apart: The largest difference of another replica from it.
      replica: The replica that differs most.
    """

    array: np.ndarray
    apart: float = 0.0
    replica: int = 0


@dataclasses.dataclass
class State:
    """An optimizer at one moment, and the variables that it trains.

    Attributes:
      iterations: The number of updates that it has made.
      learning_rates: Its learning rate, or the rates of the optimizers inside.
      weights: The variables that it trains, by path.
      slots: Its variables of the shape of a trained variable, by path.
    """

    iterations: int
    learning_rates: list[float]
    weights: dict[str, Value]
    slots: dict[str, Value]


@dataclasses.dataclass
class Step:
    """Holds what a step has left.

    Attributes:
      states: Each optimizer, in the order in which they were built.
      loss: What the step returned, if it is a number.
      rows: How many rows it has trained on, if they were seen.
    """

    states: list[State]
    loss: float | None = None
    rows: int | None = None


@dataclasses.dataclass
class Pass:
    """The batches that one iterator has taken from a dataset.

    Attributes:
      batches: The digests of the rows of each batch, sorted.
      is_trained: Whether a step came after its first batch. `fit` takes a batch
        of another iterator to build the model.
      position: How many of its batches the steps have trained on.
    """

    batches: list[list[int]] = dataclasses.field(default_factory=list)
    is_trained: bool = False
    position: int = 0


@dataclasses.dataclass
class Recording:
    """A run.

    Attributes:
      status: One of the constants of this module.
      message: Why it was refused, with what to do.
      error: The last lines of the error of a script that has failed.
      starts: Each optimizer before its first step.
      steps: What is left by each step.
      idle: The names of optimizers that have made no update.
      rows: The passes over each dataset.
      notes: What the run left out or changed.
      features: What the script uses that a cure may be for.
    """

    status: str = TRAINED
    message: str = ""
    error: str = ""
    starts: list[State] = dataclasses.field(default_factory=list)
    steps: list[Step] = dataclasses.field(default_factory=list)
    idle: list[str] = dataclasses.field(default_factory=list)
    rows: list[list[Pass]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    features: set[str] = dataclasses.field(default_factory=set)

    def note(self, text: str) -> None:
        """Adds a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def moved(self) -> float:
        """Returns the largest movement of a weight since the start."""
        return max(
            movement(state.weights, start.weights)
            for state, start in zip(
                self.steps[-1].states, self.starts, strict=True
            )
        )


def largest(array: np.ndarray) -> float:
    """Returns the largest absolute value; infinity if one is not finite."""
    if not array.size:
        return 0.0
    number = float(np.max(np.abs(array)))
    return number if np.isfinite(number) else float("inf")


def movement(values: dict[str, Value], start: dict[str, Value]) -> float:
    """Returns the largest change of a value; what had none begins at zero."""
    return max(
        (
            largest(value.array.astype("float64") - start[name].array)
            if name in start and start[name].array.shape == value.array.shape
            else largest(value.array)
            for name, value in values.items()
        ),
        default=0.0,
    )


def inside(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """Lists the optimizers that an optimizer delegates to."""
    found = [
        getattr(optimizer, name, None)
        for name in ("inner_optimizer", "local_optimizer")
    ]
    found += getattr(optimizer, "optimizers", None) or []
    return [one for one in found if isinstance(one, keras.optimizers.Optimizer)]


def all_of(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[keras.optimizers.Optimizer]:
    """Yields an optimizer and all optimizers inside it."""
    yield optimizer
    for one in inside(optimizer):
        yield from all_of(one)


def iterations(optimizer: keras.optimizers.Optimizer) -> int:
    """Returns the number of an optimizer's updates."""
    return int(_number(optimizer.iterations))


def state(
    optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]
) -> State:
    """Reads an optimizer and the variables that it trains, on all replicas."""
    learning_rates = [
        float(_number(one.learning_rate))
        for one in all_of(optimizer)
        if not inside(one)
    ]
    return State(
        iterations(optimizer),
        learning_rates,
        _by_path(variables),
        _by_path(_slot_variables(optimizer, variables)),
    )


def _by_path(variables: Iterable[Any]) -> dict[str, Value]:
    """Reads variables; several may have one path."""
    found: dict[str, Value] = {}
    for variable in variables:
        path = replica_variables.path(variable)
        while path in found:
            path += "'"
        found[path] = _copies_of(variable)
    return found


def _slot_variables(
    optimizer: keras.optimizers.Optimizer, trained: list[keras.Variable]
) -> Iterator[keras.Variable]:
    """Yields the slot variables, which have the shape of a trained variable."""
    shapes = {tuple(one.shape) for one in trained}
    for one in all_of(optimizer):
        for variable in one.variables:
            if (
                "float" in variable.dtype
                and len(variable.shape)
                and tuple(variable.shape) in shapes
                and not isinstance(variable, keras_shards.Sharded)
            ):
                yield variable


def _copies_of(variable: keras.Variable) -> Value:
    first, *others = (
        np.array(one) for one in replica_variables.copies(variable)
    )
    value = Value(first)
    for replica, copy in enumerate(others, 1):
        if not np.array_equal(first, copy, equal_nan=True):
            apart = largest(copy.astype("float64") - first)
            if apart > value.apart:
                value.apart, value.replica = apart, replica
    return value


def _number(value: Any) -> np.ndarray:
    if isinstance(value, keras.Variable):
        value = replica_variables.copies(value)[0]
    return np.asarray(value)
