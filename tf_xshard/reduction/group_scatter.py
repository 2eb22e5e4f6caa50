"""Per-replica gradients -> this replica's shard of the group's gradient.

gradients of replica r    -- reduce-scatter -->   its shard of their mean or sum
its shard of the weights  -- all-gather     -->   the weights

Together they send as many bytes as the all-reduce of `group_sum`.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_xshard.distribute import shards as shards_lib
from tf_xshard.distribute import site as site_lib
from tf_xshard.reduction import buckets
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import group_sum


def reduce_scatter(
    reducer: group_sum.GroupReducer,
    gradients: Sequence,
    variables: Sequence,
    site: site_lib.Site,
    reduction: str,
    multiplier: float = 1,
) -> list:
    """This replica's shards of what `reducer.reduce` returns.

    Args:
      reducer: The optimizer's reducer, of groups of several replicas.
      gradients: As for `GroupReducer.reduce`.
      variables: As for `GroupReducer.reduce`.
      site: Where the code runs.
      reduction: `"mean"` or `"sum"`.
      multiplier: As for `GroupReducer.reduce`.

    Returns:
      A dense shard for each variable, see `distribute.shards`, or None where
      no replica of the group has a gradient.
    """
    transport = reducer.transport(site)

    def of_rows(
        slices: Sequence[tf.IndexedSlices], owners: Sequence
    ) -> list[tf.Tensor]:
        position = transport.position()
        return [
            shards_lib.Layout(
                tuple(variable.shape), transport.groups
            ).shard_of_rows(rows, position)
            for rows, variable in zip(slices, owners, strict=True)
        ]

    if reduction == "mean":
        multiplier = multiplier / transport.groups.group_size
    return [
        gradients_lib.scaled(total, multiplier)
        for total in reducer.combined(
            gradients,
            variables,
            transport,
            lambda tensors, owners: reducer.with_feedback(
                buckets.scatter_dense, tensors, owners, transport
            ),
            of_rows,
        )
    ]


def all_gather(
    reducer: group_sum.GroupReducer,
    shards: Sequence[tf.Tensor],
    layouts: Sequence[shards_lib.Layout],
    site: site_lib.Site,
    wanted: Sequence[bool],
) -> list:
    """Joins the shards of a group's replicas.

    Args:
      reducer: The optimizer's reducer.
      shards: This replica's shards.
      layouts: How they are split.
      site: Where the code runs.
      wanted: Which of them this group needs.

    Returns:
      A whole tensor for each shard, bitwise equal on all replicas of the group,
      or None where it is not wanted.
    """
    transport = reducer.transport(site)
    # Groups that share an operation may want different ones.
    indices = [
        i for i, want in enumerate(wanted) if want or transport.spans_groups
    ]
    wholes = buckets.gather_dense(
        [shards[i] for i in indices], [layouts[i] for i in indices], transport
    )
    result: list = [None] * len(shards)
    for index, whole in zip(indices, wholes, strict=True):
        result[index] = whole if wanted[index] else None
    return result
