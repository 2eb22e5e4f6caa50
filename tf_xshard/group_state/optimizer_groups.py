"""The groups of replicas that a model's optimizers make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import group_relations
from tf_xshard.optimizers import tree


def joined(
    optimizers: Mapping[str, Sequence], num_replicas: int, where: str
) -> group_assignment_lib.GroupAssignment:
    """The groups that the nested optimizers of a model make together.

    Args:
      optimizers: For each part of the model its optimizers, including nested
        ones.
      num_replicas: The number of replicas.
      where: What has that many, for errors.

    Returns:
      A `GroupAssignment`.

    Raises:
      ValueError: If two parts have different groups, or groups are for another
        number of replicas.
    """
    found = {}
    for name, of_part in optimizers.items():
        assignments = [
            group_relations.for_replicas(
                one.group_assignment, num_replicas, where
            )
            for one in of_part
            if tree.is_wrapper(one)
        ]
        if assignments:
            found[name] = group_relations.joined(assignments)
    # A plain Keras optimizer reduces over all replicas.
    first, *others = found.values() or [
        group_assignment_lib.GroupAssignment.single(num_replicas)
    ]
    if not all(group_relations.same_groups(first, other) for other in others):
        raise ValueError(
            "GroupState: optimizers have different groups,"
            f" { {n: g.to_list() for n, g in found.items()} }. Pass"
            " group_assignment, or create one GroupState for each."
        )
    return first
