"""How far replicas are apart, and which differ that should not."""

from __future__ import annotations

from tf_xshard.group_state import catalog
from tf_xshard.group_state import combine
from tf_xshard.group_state import group_variables
from tf_xshard.group_state import table


def measured(state: group_variables.GroupVariables) -> table.Table:
    """See `GroupState.divergence`."""
    listed = state.listed(catalog.LEARNED)
    every = range(state.replicas.num_replicas)
    rows = table.Table()
    for one, values in zip(
        listed,
        state.replicas.of_replicas([v.variable for v in listed], every),
        strict=True,
    ):
        within = max(
            combine.largest_difference([values[r] for r in members])
            for members in state.group_assignment
        )
        between = combine.largest_difference(
            combine.by_group(values, state.group_assignment)
        )
        is_equal = one.kind in catalog.EQUAL_IN_A_GROUP
        rows.append(
            {
                "variable": one.name,
                "kind": one.kind,
                "within_group": within if is_equal else None,
                "between_groups": between if is_equal else None,
                "local": within if one.kind == "local" else None,
                "statistic": within if one.kind == "statistic" else None,
            }
        )
    return rows


def unequal(state: group_variables.GroupVariables, repair: bool) -> table.Table:
    """Replicas of one group that differ and should not. Collective.

    Only what they hold alike is looked at: trainable weights, slots and AGN's
    center. Where nothing differs, only checksums travel.

    Args:
      state: The groups.
      repair: Whether they take the value that most replicas of the group have,
        of equally many the first one's.

    Returns:
      A row for each such variable and group: `variable`, `group`, `replicas`
      (those that do not have what most have) and `largest_difference`.
    """
    listed = state.listed(catalog.EQUAL_IN_A_GROUP)
    digests = state.replicas.digests([one.variable for one in listed])
    rows = table.Table()
    for one, row in zip(listed, digests, strict=True):
        for group, members in enumerate(state.group_assignment):
            own = [row[r] for r in members]
            if len(set(own)) == 1:
                continue
            [values] = state.replicas.of_replicas([one.variable], members)
            difference = combine.largest_difference(values)
            if not difference:
                continue
            most = max(own, key=own.count)
            if repair:
                value = values[own.index(most)]
                state.assign_groups(one.variable, {group: value})
            rows.append(
                {
                    "variable": one.name,
                    "group": group,
                    "replicas": [
                        r
                        for r, digest in zip(members, own, strict=True)
                        if digest != most
                    ],
                    "largest_difference": difference,
                }
            )
    return rows
