"""What a run of a script has left: its steps, its data and its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from tf_xshard.distribute import replica_variables

# What a run of a script has come to.
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
      default_strategy: Whether it runs under a MirroredStrategy of ours.
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
class Step:
    """The variables after a step, of each optimizer in the order of creation.

    Attributes:
      iterations: The number of updates that each optimizer has made.
      learning_rates: The learning rate of each optimizer.
      weights: The trained variables of each optimizer, by path.
      slots: The other variables of each optimizer, by path.
      loss: What the step returned, if it is a number.
    """

    iterations: list[int]
    learning_rates: list[float]
    weights: list[dict[str, Value]]
    slots: list[dict[str, Value]]
    loss: float | None = None

    def num_updates(self) -> int:
        return sum(self.iterations)


@dataclasses.dataclass
class Recording:
    """A run.

    Attributes:
      status: One of the constants of this module.
      message: Why it was refused or has failed, with what to do.
      error: The last lines of the error of a script that has failed.
      steps: The values before the first step, and after each step.
      rows: The digests of the rows of each batch, by dataset.
      names: The class of each optimizer.
      notes: What the run left out or changed.
      features: What the script uses that a cure may be for.
    """

    status: str = TRAINED
    message: str = ""
    error: str = ""
    steps: list[Step] = dataclasses.field(default_factory=list)
    rows: list[list[list[int]]] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    features: set[str] = dataclasses.field(default_factory=set)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _value(variable: keras.Variable) -> Value:
    copies = [np.array(one) for one in replica_variables.copies(variable)]
    first = copies[0]
    value = Value(first)
    for replica, copy in enumerate(copies[1:], 1):
        if not np.array_equal(first, copy):
            apart = largest(copy.astype("float64") - first)
            if apart > value.apart:
                value.apart, value.replica = apart, replica
    return value


def largest(array: np.ndarray) -> float:
    """Returns the largest absolute value; infinity if one is not finite."""
    if not array.size:
        return 0.0
    number = float(np.max(np.abs(array)))
    return number if np.isfinite(number) else float("inf")


def leaves(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[keras.optimizers.Optimizer]:
    """Yields an optimizer and all optimizers inside it."""
    yield optimizer
    inside = [
        getattr(optimizer, name, None)
        for name in ("inner_optimizer", "local_optimizer")
    ]
    inside += getattr(optimizer, "optimizers", None) or []
    for one in inside:
        if isinstance(one, keras.optimizers.Optimizer):
            yield from leaves(one)


def outermost(
    optimizers: Iterable[keras.optimizers.Optimizer],
) -> list[keras.optimizers.Optimizer]:
    """Drops the optimizers that are inside of another one."""
    found = list(optimizers)
    inside = {id(one) for outer in found for one in list(leaves(outer))[1:]}
    return [one for one in found if id(one) not in inside]


def capture(
    trained: Sequence[tuple[keras.optimizers.Optimizer, list[keras.Variable]]],
) -> Step:
    """Reads optimizers and the variables that they train, on all replicas."""
    step = Step([], [], [], [])
    for optimizer, variables in trained:
        step.iterations.append(int(_number(optimizer.iterations)))
        step.learning_rates.append(float(_number(optimizer.learning_rate)))
        step.weights.append({v.path: _value(v) for v in variables})
        step.slots.append(dict(_slots(optimizer, variables)))
    return step


def _slots(
    optimizer: keras.optimizers.Optimizer, trained: list[keras.Variable]
) -> Iterator[tuple[str, Value]]:
    """Yields the slot variables, which have the shape of a trained variable."""
    shapes = {tuple(v.shape) for v in trained}
    for one in leaves(optimizer):
        for variable in one.variables:
            if (
                "float" in variable.dtype
                and len(variable.shape)
                and tuple(variable.shape) in shapes
                and not hasattr(variable, "store")  # A shard.
            ):
                yield variable.path, _value(variable)


def _number(value: Any) -> np.ndarray:
    if isinstance(value, keras.Variable):
        value = replica_variables.copies(value)[0]
    return np.asarray(value)
