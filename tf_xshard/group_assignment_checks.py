"""Checks of a group assignment, with a separate error for each mistake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_xshard import checks

_HINT = (
    "Expected a [num_groups, replicas_per_group] nested list of replica ids,"
    " such as [[0, 1], [2, 3]]."
)


def _as_replica_id(value: Any) -> int | None:
    """Returns `value` as an int, or None if it is a bool or no integer."""
    try:
        return checks.integer("replica id", value)
    except TypeError:
        return None


def validated_rows(groups: Any) -> tuple[tuple[int, ...], ...]:
    """Checks groups, and returns them as tuples of ints."""
    nested = [_sequence(row, groups) for row in _sequence(groups, groups)]
    if not any(nested):
        raise ValueError(f"group_assignment {groups!r} is empty. {_HINT}")
    ids = []
    for row in nested:
        for value in row:
            if _sequence_or_none(value) is not None:
                raise ValueError(
                    f"group_assignment has more than two dimensions: {groups!r}"
                    f". {_HINT}"
                )
            replica_id = _as_replica_id(value)
            if replica_id is None:
                raise TypeError(
                    f"group_assignment holds {value!r}"
                    f" ({type(value).__name__}), which is not an integer"
                    f" replica id: {groups!r}. {_HINT}"
                )
            if replica_id < 0:
                raise ValueError(
                    f"group_assignment holds the negative replica id"
                    f" {replica_id}: {groups!r}. Replica ids start at 0."
                )
            ids.append(replica_id)
    rows = tuple(tuple(int(value) for value in row) for row in nested)
    _check_each_id_once(rows, ids)
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            "group_assignment has groups of different sizes"
            f" {[len(row) for row in rows]}: {_shown(rows)}. All groups must"
            " have the same number of replicas."
        )
    return rows


def num_groups(num_replicas: int, group_size: int) -> int:
    """Returns the number of equal groups, or raises if sizes do not fit."""
    num_replicas = checks.positive_integer("num_replicas", num_replicas)
    group_size = checks.positive_integer("group_size", group_size)
    if num_replicas % group_size:
        raise ValueError(
            f"group_size={group_size} does not divide"
            f" num_replicas={num_replicas}: every replica must be in exactly"
            " one group, and all groups have the same size."
        )
    return num_replicas // group_size


def _check_each_id_once(
    rows: Sequence[Sequence[int]], ids: Sequence[int]
) -> None:
    seen: dict[int, int] = {}
    for index, row in enumerate(rows):
        for replica_id in row:
            if replica_id in seen:
                where = (
                    f"twice in group {index}"
                    if seen[replica_id] == index
                    else f"in groups {seen[replica_id]} and {index}"
                )
                raise ValueError(
                    f"group_assignment puts replica {replica_id} {where}:"
                    f" {_shown(rows)}. Each replica id must appear exactly"
                    " once."
                )
            seen[replica_id] = index
    missing = sorted(set(range(max(ids) + 1)) - set(ids))
    if missing:
        named = ", ".join(str(i) for i in missing[:8])
        more = ", ..." if len(missing) > 8 else ""
        raise ValueError(
            f"group_assignment leaves out replica {named}{more}: {_shown(rows)}"
            f". Every replica id from 0 to {max(ids)} must be in a group."
        )


def _shown(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(row) for row in rows]


def _sequence_or_none(value: Any) -> list | None:
    if isinstance(value, np.ndarray) and value.ndim:
        return list(value)
    if isinstance(value, (list, tuple, range)):
        return list(value)
    return None


def _sequence(value: Any, groups: Any) -> list:
    found = _sequence_or_none(value)
    if found is not None:
        return found
    if value is not groups and _as_replica_id(value) is not None:
        raise ValueError(
            f"group_assignment is not two-dimensional: {groups!r}. {_HINT}"
        )
    raise TypeError(
        f"group_assignment got {value!r} ({type(value).__name__}), which is not"
        f" a list of replica ids. {_HINT}"
    )
