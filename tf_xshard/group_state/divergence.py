"""Measures how far replicas have diverged, and repairs differences."""

from __future__ import annotations

from tf_xshard.group_state import inventory
from tf_xshard.group_state import merge
from tf_xshard.group_state import replica_io
from tf_xshard.group_state import table as table_lib


def table(
    catalog: inventory.Catalog, replicas: replica_io.ReplicaValues
) -> table_lib.Table:
    """See `GroupState.divergence`. Collective."""
    variables = catalog.variables(inventory.LEARNED)
    every = range(replicas.num_replicas)
    rows = table_lib.Table()
    for one, values in zip(
        variables,
        replicas.gather([v.variable for v in variables], every),
        strict=True,
    ):
        within = max(
            merge.largest_difference([values[r] for r in members])
            for members in catalog.groups
        )
        between = merge.largest_difference(
            merge.by_group(values, catalog.groups)
        )
        is_equal = one.kind in inventory.EQUAL_IN_A_GROUP
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


def unequal(
    catalog: inventory.Catalog,
    replicas: replica_io.ReplicaValues,
    repair: bool,
) -> table_lib.Table:
    """Finds unexpected differences between a group's replicas. Collective."""
    # If nothing differs, only checksums are communicated.
    variables = catalog.variables(inventory.EQUAL_IN_A_GROUP)
    digests = replicas.digests([one.variable for one in variables])
    rows = table_lib.Table()
    for one, row in zip(variables, digests, strict=True):
        for group, members in enumerate(catalog.groups):
            own = [row[r] for r in members]
            if len(set(own)) == 1:
                continue
            [values] = replicas.gather([one.variable], members)
            difference = merge.largest_difference(values)
            if not difference:
                continue
            most = max(own, key=own.count)
            if repair:
                value = values[own.index(most)]
                replicas.assign_groups(
                    one.variable, catalog.groups, {group: value}
                )
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
