"""Compares two recordings of a script."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from tf_xshard.cli.compare import recording as recording_lib

# Of the largest movement. In float64, what is right stays below 1e-10, and what
# is wrong is above 1e-2.
TOLERANCE = 1e-7
# In another dtype: of what permuted rows change.
TIMES_ROUNDING = 10


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest difference after a step.

    Attributes:
      ratio: As a part of the largest movement of a variable of its kind.
      variable: The path of the variable.
      replica: The replica on which it was found.
      moved: The largest movement of a weight since the start.
      among_replicas: Whether replicas of one run differ from each other.
    """

    ratio: float
    variable: str
    replica: int
    moved: float
    among_replicas: bool = False

    def where(self) -> str:
        """Returns the variable, and the replica if only one is off."""
        if self.among_replicas:
            return (
                f"{self.variable}, replica {self.replica} differs from"
                " replica 0"
            )
        return self.variable


def worst(found: list[Difference]) -> float:
    """Returns the largest difference."""
    return max(each.ratio for each in found)


def not_comparable(
    one: recording_lib.Recording,
    many: recording_lib.Recording,
    num_replicas: int,
    allowed: float,
) -> str | None:
    """Returns why two runs did not do the same, or None."""
    for where, rows, others in _batches(one, many):
        if len(rows) != len(others):
            return (
                f"{where} has {len(rows)} rows on one replica and"
                f" {len(others)} on {num_replicas}. Compute the batch size"
                " from strategy.num_replicas_in_sync, which both runs see"
                f" as {num_replicas}, or in distribute_datasets_from_function"
                " by context.get_per_replica_batch_size(global_batch_size)."
            )
        if rows != others:
            return (
                "your script feeds different data in its two runs, first in"
                f" {where}. Set the seed of what shuffles or makes"
                " it, for example dataset.shuffle(size, seed=1)."
            )
    if [len(each.states) for each in one.steps] != [
        len(each.states) for each in many.steps
    ]:
        return (
            f"{len(one.steps)} steps were seen on one replica, and"
            f" {len(many.steps)} on {num_replicas}. Set the seeds of what"
            " decides on a step."
        )
    for index, (step, other) in enumerate(
        zip(one.steps, many.steps, strict=True)
    ):
        rates = [
            [rate for state in each.states for rate in state.learning_rates]
            for each in (step, other)
        ]
        if not np.allclose(rates[0], rates[1], rtol=1e-6, atol=0):
            return (
                f"the learning rates of step {index + 1} are {rates[0]} on one"
                f" replica and {rates[1]} on {num_replicas}. Compute them from"
                " strategy.num_replicas_in_sync, which both runs see as"
                f" {num_replicas}."
            )
    last = one.steps[-1].states
    for start, begin, end in zip(one.starts, many.starts, last, strict=True):
        moved = recording_lib.movement(end.weights, start.weights)
        if not np.isfinite(moved):
            return (
                "the weights become infinite or nan on one replica. Use a"
                " smaller learning rate."
            )
        found = list(_of_values(start.weights, begin.weights, moved))
        if found and worst(found) > allowed:
            return (
                "the weights differ before the first step. Set the seed of what"
                " initializes them, or pass --copy if the script restores them."
            )
    return None


def _batches(
    one: recording_lib.Recording, many: recording_lib.Recording
) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yields each batch of both runs, and its name."""
    for passes in zip(one.rows, many.rows, strict=False):
        trained = [[one for one in each if one.is_trained] for each in passes]
        for epoch, pair in enumerate(zip(*trained, strict=False), 1):
            batches = zip(*(each.batches for each in pair), strict=False)
            for number, (rows, others) in enumerate(batches, 1):
                yield f"batch {number} of epoch {epoch}", rows, others


def differences(
    one: recording_lib.Recording, many: recording_lib.Recording
) -> list[Difference]:
    """Returns the largest difference after each step."""
    result = []
    for step, other in zip(one.steps, many.steps, strict=False):
        found = [
            each
            for states in zip(
                step.states, other.states, one.starts, strict=False
            )
            for each in _of_states(*states)
        ]
        moved = max(
            recording_lib.movement(state.weights, start.weights)
            for state, start in zip(step.states, one.starts, strict=False)
        )
        largest = max(found, key=lambda each: each.ratio)
        result.append(dataclasses.replace(largest, moved=moved))
    return result


def is_loss_divided(
    one: recording_lib.Recording, many: recording_lib.Recording
) -> bool:
    """Returns True if all losses differ by one factor, such as 1/N."""
    pairs = [
        (step.loss, other.loss)
        for step, other in zip(one.steps, many.steps, strict=False)
        if step.loss and other.loss
    ]
    ratios = [theirs / mine for mine, theirs in pairs]
    return bool(ratios) and ratios[0] < 0.9 and np.allclose(ratios, ratios[0])


def rounding(
    one: recording_lib.Recording, permuted: recording_lib.Recording
) -> float:
    """Returns the largest difference that another order may make."""
    # With few rows, both orders may give the same sum. Then use the last bit.
    last_bits = [
        _ratio(
            float(np.max(np.spacing(np.abs(value.array)), initial=0.0)),
            recording_lib.movement(state.weights, start.weights),
        )
        for step in one.steps
        for state, start in zip(step.states, one.starts, strict=False)
        for value in state.weights.values()
    ]
    finite = [ratio for ratio in last_bits if np.isfinite(ratio)]
    return max(TIMES_ROUNDING * worst(differences(one, permuted)), *finite)


def _of_states(
    state: recording_lib.State,
    other: recording_lib.State,
    start: recording_lib.State,
) -> Iterator[Difference]:
    moved = recording_lib.movement(state.weights, start.weights)
    yield from _of_values(state.weights, other.weights, moved)
    kinds: dict[str, dict[str, recording_lib.Value]] = {}
    theirs = _by_name(state.slots, other.slots)
    for name, value in state.slots.items():
        # Keras: the path of the variable, `_` and the name of the slot.
        kinds.setdefault(name.rsplit("_", 1)[-1], {})[name] = value
    for values in kinds.values():
        moved = recording_lib.movement(values, start.slots)
        some = {name: theirs[name] for name in values if name in theirs}
        yield from _of_values(values, some, moved)


def _of_values(
    mine: Mapping[str, recording_lib.Value],
    theirs: Mapping[str, recording_lib.Value],
    moved: float,
) -> Iterator[Difference]:
    theirs = _by_name(mine, theirs)
    for name, value in mine.items():
        other = theirs.get(name)
        if other is None or value.array.shape != other.array.shape:
            continue
        apart = recording_lib.largest(
            value.array.astype("float64") - other.array
        )
        yield Difference(_ratio(apart, moved), name, 0, 0.0)
        if other.apart:
            yield Difference(
                _ratio(other.apart, moved), name, other.replica, 0.0, True
            )


def _by_name(
    mine: Mapping[str, recording_lib.Value],
    theirs: Mapping[str, recording_lib.Value],
) -> Mapping[str, recording_lib.Value]:
    """Renames the values of another run, since Keras numbers its names."""
    if len(mine) == len(theirs):
        return dict(zip(mine, theirs.values(), strict=True))
    return theirs


def _ratio(apart: float, moved: float) -> float:
    if not apart:
        return 0.0
    return apart / moved if moved and np.isfinite(moved) else float("inf")
