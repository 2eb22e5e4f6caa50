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


def differences(
    one: recording_lib.Recording, many: recording_lib.Recording
) -> list[Difference]:
    """Returns the largest difference after each step."""
    result = []
    start = one.steps[0]
    for step, other in zip(one.steps[1:], many.steps[1:], strict=False):
        found = list(_of_step(step, other, start))
        moved = max(
            _movement(values, _by_name(values, begin))
            for values, begin in zip(step.weights, start.weights, strict=False)
        )
        worst = max(found, key=lambda each: each.ratio)
        result.append(dataclasses.replace(worst, moved=moved))
    return result


def _of_step(
    step: recording_lib.Step,
    other: recording_lib.Step,
    start: recording_lib.Step,
) -> Iterator[Difference]:
    for index in range(len(step.weights)):
        for kind in ("weights", "slots"):
            mine = getattr(step, kind)[index]
            theirs = _by_name(mine, getattr(other, kind)[index])
            begin = _by_name(mine, getattr(start, kind)[index])
            for names in _kinds(mine, kind):
                moved = _movement({name: mine[name] for name in names}, begin)
                for name in set(names) & set(theirs):
                    yield from _of_value(name, mine[name], theirs[name], moved)


def _by_name(
    mine: Mapping[str, recording_lib.Value],
    theirs: Mapping[str, recording_lib.Value],
) -> Mapping[str, recording_lib.Value]:
    """Renames the values of another run, since Keras numbers its names."""
    if len(mine) == len(theirs):
        return dict(zip(mine, theirs.values(), strict=True))
    return theirs


def _kinds(
    values: Mapping[str, recording_lib.Value], kind: str
) -> list[list[str]]:
    """Groups variables that are measured by one movement."""
    if kind == "weights":
        return [list(values)]
    found: dict[str, list[str]] = {}
    for name in values:
        # Keras: the path of the variable, `_` and the name of the slot.
        found.setdefault(name.rsplit("_", 1)[-1], []).append(name)
    return list(found.values())


def _movement(
    values: Mapping[str, recording_lib.Value],
    start: Mapping[str, recording_lib.Value],
) -> float:
    """Returns the largest change of a value since the start."""
    return max(
        (
            recording_lib.largest(
                value.array.astype("float64") - start[name].array
                if name in start
                else value.array
            )
            for name, value in values.items()
        ),
        default=0.0,
    )


def _of_value(
    name: str,
    mine: recording_lib.Value,
    theirs: recording_lib.Value,
    moved: float,
) -> Iterator[Difference]:
    if mine.array.shape != theirs.array.shape:
        return
    apart = recording_lib.largest(mine.array.astype("float64") - theirs.array)
    yield Difference(_ratio(apart, moved), name, 0, 0.0)
    if theirs.apart:
        yield Difference(
            _ratio(theirs.apart, moved), name, theirs.replica, 0.0, True
        )


def _ratio(apart: float, moved: float) -> float:
    if not apart:
        return 0.0
    return apart / moved if moved and np.isfinite(moved) else float("inf")


def first_different_rows(
    one: recording_lib.Recording, many: recording_lib.Recording
) -> int | None:
    """Returns the first step whose rows differ, or None; from 1."""
    for mine, theirs in zip(one.rows, many.rows, strict=False):
        for index, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if a != b:
                return index + 1
    return None


def different_rates(
    one: recording_lib.Recording, many: recording_lib.Recording
) -> tuple[int, list[float], list[float]] | None:
    """Returns the first step whose learning rates differ, with both."""
    for index, (step, other) in enumerate(
        zip(one.steps, many.steps, strict=False)
    ):
        if not np.allclose(
            step.learning_rates, other.learning_rates, rtol=1e-6
        ):
            return index, step.learning_rates, other.learning_rates
    return None
