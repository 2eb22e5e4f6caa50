"""Compares and combines group assignments."""

from __future__ import annotations

from collections.abc import Sequence

from tf_xshard import group_assignment as group_assignment_lib


def for_replicas(
    groups: group_assignment_lib.GroupAssignment | None,
    num_replicas: int,
    where: str = "the strategy",
) -> group_assignment_lib.GroupAssignment:
    """Checks that groups fit; returns one group of all replicas for None."""
    if groups is None:
        return group_assignment_lib.GroupAssignment.single(num_replicas)
    if groups.num_replicas != num_replicas:
        remedy = f" Pass one for {num_replicas}."
        if where.startswith("the strategy "):
            remedy = (
                f" Pass one for {num_replicas} (for a saved model: load it with"
                " compile=False and compile it again), and use the optimizer"
                " under the strategy that it was written for."
            )
        raise ValueError(
            f"group_assignment {groups.to_list()} is for"
            f" {groups.num_replicas} replicas, but {where} has {num_replicas}."
            f"{remedy}"
        )
    return groups


def same_groups(
    one: group_assignment_lib.GroupAssignment,
    other: group_assignment_lib.GroupAssignment,
) -> bool:
    """Returns whether the same replicas are grouped, in any order."""
    return set(map(frozenset, one)) == set(map(frozenset, other))


def joined(
    assignments: Sequence[group_assignment_lib.GroupAssignment],
) -> group_assignment_lib.GroupAssignment:
    """Merges groups of several assignments that share a replica."""
    # For example, nested optimizers that reduce over rows and over columns
    # together reduce over all replicas.
    first, *others = assignments
    groups = [set(group) for group in first]
    for assignment in others:
        for other in assignment:
            together = [group for group in groups if group & set(other)]
            rest = [group for group in groups if not group & set(other)]
            at = groups.index(together[0])
            groups = rest
            groups.insert(min(at, len(rest)), set().union(*together))
    if len(groups) == first.num_groups:
        return first
    return group_assignment_lib.GroupAssignment(
        [sorted(group) for group in groups]
    )
