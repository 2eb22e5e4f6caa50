"""Averages, converts and compares values of replicas and groups in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np


def is_floating(dtype: np.dtype) -> bool:
    """Returns True if values of a dtype can be averaged."""
    # NumPy gives the types of ml_dtypes, such as bfloat16, the kind "V".
    return np.dtype(dtype).kind in "fcV"


def as_type(value: Any, like: np.dtype, name: str) -> np.ndarray:
    """Converts a user's value to an array of a variable's dtype."""
    value = np.asarray(value)
    like = np.dtype(like)
    allowed = "b" if like.kind == "b" else "biu"
    if is_floating(like):
        allowed = "biufV" + ("c" if like.kind == "c" else "")
    if value.dtype.kind not in allowed or (
        # Structured types also have the kind "V".
        value.dtype.kind == "V" and value.dtype.names
    ):
        raise ValueError(
            f"{name!r} has dtype {like.name}, got values of {value.dtype.name}."
            f" Convert them: values.astype({like.name!r})."
        )
    return value.astype(like)


def one_per_group(
    values: Sequence,
    num_groups: int,
    dtype: np.dtype,
    shape: tuple[int, ...],
    name: str,
) -> list[np.ndarray]:
    """Converts a user's values for one variable, one value per group."""
    arrays = [as_type(value, dtype, name) for value in values]
    if len(arrays) != num_groups or any(
        array.shape != shape for array in arrays
    ):
        raise ValueError(
            f"assign() needs {num_groups} values of shape {shape},"
            f" one for each group, got shapes {[v.shape for v in arrays]}."
        )
    return arrays


def combined(
    values: Sequence[np.ndarray], weights: Sequence[float] | None = None
) -> np.ndarray:
    """Returns the weighted mean of values; equal values stay unchanged."""
    if weights is not None and max(weights) == 1:
        return values[list(weights).index(1)]
    first = values[0]
    if all(_same_bits(first, other) for other in values[1:]):
        return first
    # Counters and random states have no mean. Return the value with the largest
    # weight, or the first such value.
    if not is_floating(first.dtype):
        return first if weights is None else values[int(np.argmax(weights))]
    wide = np.complex128 if first.dtype.kind == "c" else np.float64
    if weights is None:
        weights = [1 / len(values)] * len(values)
    total: Any = np.zeros(first.shape, wide)
    for value, weight in zip(values, weights, strict=True):
        if weight:
            total += weight * value.astype(wide)
    return total.astype(first.dtype)


def by_group(
    values: Sequence[np.ndarray], groups: Iterable[Sequence[int]]
) -> list[np.ndarray]:
    """Combines one value per replica into one value per group."""
    return [combined([values[r] for r in members]) for members in groups]


def largest_difference(values: Sequence[np.ndarray]) -> float:
    """Returns the largest absolute difference between any two arrays."""
    first = values[0]
    others = [v for v in values[1:] if not _same_bits(first, v)]
    if not others or not first.size:
        return 0.0
    if first.dtype.kind in "SUO":
        return float("inf")
    if first.dtype.kind == "c":
        parts = [first, *others]
        return max(
            largest_difference([v.real for v in parts]),
            largest_difference([v.imag for v in parts]),
        )
    stacked = np.stack([first, *others])
    if first.dtype.kind in "iub":
        # float64 can't distinguish neighboring large integers (seeds).
        spread = stacked.max(0).astype(object) - stacked.min(0).astype(object)
        return float(np.max(spread))
    stacked = stacked.astype(np.float64)
    # Two nans do not differ. A nan and a number differ by infinity.
    is_nan = np.isnan(stacked)
    high, low = stacked.max(0), stacked.min(0)
    with np.errstate(invalid="ignore"):
        spread = np.where(high == low, 0.0, high - low)
    spread = np.where(is_nan.any(0), np.inf, spread)
    return float(np.where(is_nan.all(0), 0.0, spread).max())


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one is other or one.tobytes() == other.tobytes()


def merge_weights(
    how: Any, num_groups: int, checked_group: Callable[[Any], int]
) -> list[float] | None:
    """Converts the argument of `GroupState.merge` to weights, or None."""
    if isinstance(how, str):
        if how != "mean":
            raise ValueError(
                'merge() takes "mean", a group\'s index, or one weight for'
                f" each group, got {how!r}."
            )
        return None
    if isinstance(how, (int, np.integer)):
        return np.eye(num_groups)[checked_group(how)].tolist()
    weights = np.asarray(how, np.float64)
    if (
        weights.shape != (num_groups,)
        or not np.isfinite(weights).all()
        or (weights < 0).any()
        or not weights.sum() > 0
    ):
        raise ValueError(
            f"merge() needs {num_groups} weights, one for each group, got"
            f" {how!r}. Weights must be finite and nonnegative, and not all 0."
        )
    return (weights / weights.sum()).tolist()
