"""Checks that `shard_update=True` keeps the weights with 1/g of the slots."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tf_xshard
from tf_xshard.cli.demo import promises as promises_lib
from tf_xshard.cli.demo import training
from tf_xshard.distribute import replica_variables


def check(
    promises: promises_lib.Promises,
    runs: training.Runs,
    groups: tf_xshard.GroupAssignment,
    whole: training.Trained,
    tolerances: Sequence[float],
) -> None:
    """Trains in groups with a sharded update, and compares the results."""
    sharded = runs.replicated(
        f"CrossShardOptimizer in {groups.num_groups} groups, shard_update=True",
        lambda inner: tf_xshard.CrossShardOptimizer(
            inner, group_assignment=groups, shard_update=True
        ),
    )
    for index, members in enumerate(groups):
        promises.check(
            f"group {index}, sharded update",
            sharded,
            whole.weights[members[0]],
            tolerances[index],
            members,
        )
    held, whole_size = (_slot_elements(one) for one in (sharded, whole))
    promises.show(
        "slot variables of a replica",
        remark=f"{held} numbers instead of {whole_size}",
    )
    expected = sum(
        math.ceil(int(v.shape.num_elements()) / groups.group_size)
        for v in whole.model.optimizer.variables
        if len(v.shape)
    )
    promises.check_that(
        held == expected,
        f"a replica holds {held} numbers of slot variables, not {expected}",
    )


def _slot_elements(trained: training.Trained) -> int:
    """Counts the numbers in the slot variables of the first replica."""
    return sum(
        int(replica_variables.copies(v)[0].shape.num_elements())
        for v in trained.model.optimizer.variables
        if len(v.shape)
    )
