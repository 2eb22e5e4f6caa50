"""Pairs a model's variables with the entries of a save."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tf_xshard.group_state import inventory


def matched(
    variables: Sequence[inventory.StateVariable],
    saved: list[dict[str, Any]],
    directory: str,
) -> list[tuple[inventory.StateVariable, int, dict]]:
    """Pairs variables with the indices and entries of a save."""
    own = [one for one in variables if one.kind != "metric"]
    its = [
        (index, one)
        for index, one in enumerate(saved)
        if one["kind"] != "metric"
    ]
    # The same names in another order mean reordered layers. Check this first,
    # since the comparison below ignores Keras's numbers in the names.
    mine, theirs = (
        [_last(n) for n in names]
        for names in (
            [one.name for one in own if not one.of_optimizer],
            [other["name"] for _, other in its if not other["of_optimizer"]],
        )
    )
    if mine != theirs and sorted(mine) == sorted(theirs):
        first = next(a for a, b in zip(mine, theirs, strict=True) if a != b)
        raise ValueError(
            f"{directory!r} was saved from a model whose variables are in"
            f" another order; the first that differs is {first!r}. Build the"
            " layers in the order in which they were saved."
        )
    for one, (_, other) in zip(own, its, strict=False):
        site = (
            *(one.part, one.shape, one.dtype),
            _own_name(one.name, one.of_optimizer),
        )
        there = (
            other["part"],
            tuple(other["shape"]),
            other["dtype"],
            _own_name(other["name"], other["of_optimizer"]),
        )
        if site != there:
            raise ValueError(
                f"{directory!r} was saved from another model or optimizer:"
                f" in place of {one.name!r} of {one.part!r},"
                f" {one.dtype} {list(one.shape)}, it has {other['name']!r} of"
                f" {other['part']!r}, {other['dtype']} {other['shape']}."
            )
    if len(own) != len(its):
        longer = (
            [one.name for one in own]
            if len(own) > len(its)
            else [other["name"] for _, other in its]
        )
        raise ValueError(
            f"{directory!r} was saved from another model or optimizer: it has"
            f" {len(its)} variables, but there are {len(own)} here. The first"
            f" one missing is {longer[min(len(own), len(its))]!r}."
        )
    return [
        (one, index, other)
        for one, (index, other) in zip(own, its, strict=True)
    ] + _matched_metrics(variables, saved)


def _matched_metrics(
    variables: Sequence[inventory.StateVariable],
    saved: list[dict[str, Any]],
) -> list[tuple[inventory.StateVariable, int, dict]]:
    # Keras creates and resets metrics when training begins. Several metrics
    # share a name, so either all match or none is restored.
    own = [one for one in variables if one.kind == "metric"]
    its = [
        (index, other)
        for index, other in enumerate(saved)
        if other["kind"] == "metric"
    ]
    if [(one.part, one.name, one.shape) for one in own] != [
        (other["part"], other["name"], tuple(other["shape"]))
        for _, other in its
    ]:
        return []
    return [(one, *other) for one, other in zip(own, its, strict=True)]


def _last(path: str) -> str:
    """Returns the last two names of a path, a layer's and a variable's."""
    # The path contains the model's name or not, depending on how the model was
    # created.
    return "/".join(path.split("/")[-2:])


def _own_name(path: str, of_optimizer: bool) -> str:
    """Returns the part of a variable's path that is the same in every run."""
    # Keras numbers equal names, as in `sequential_1/dense_2/kernel`. The name
    # of an optimizer's variable starts with such a path, but its last word is
    # stable.
    own = re.sub(r"_\d+", "", _last(path))
    return re.split("[/_]", own)[-1] if of_optimizer else own
