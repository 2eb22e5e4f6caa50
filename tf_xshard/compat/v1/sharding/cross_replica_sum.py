"""Defines `tf.compat.v1.tpu.cross_replica_sum`, with and without a TPU.

TensorFlow's operation runs on TPUs only. While shards are traced, a mark stands
for a sum, and its gradient is a mark again. Once all shards are traced, the
sums are put in the marks' places:

shard 0   x --> mark --> y             x --+         +--> y
                             becomes       +- add_n -+
shard 1   x --> mark --> y             x --+         +--> y
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.compat.v1.sharding import sums
from tf_xshard.compat.v1.sharding import traced_shards
from tf_xshard.private.tensorflow import autograph
from tf_xshard.private.tensorflow import v1 as tensorflow_v1


@autograph.entry_point
def cross_replica_sum(
    x: Any,
    group_assignment: (
        Sequence[Sequence[int]] | group_assignment_lib.GroupAssignment | None
    ) = None,
    name: str | None = None,
) -> tf.Tensor:
    """Sums a tensor over shards or replicas, for example batch statistics.

    It runs where `CrossShardOptimizer` runs. Its gradient is the sum of the
    shards' gradients, as on a TPU. Don't sum gradients with it that you pass to
    a `CrossShardOptimizer`, which sums them.

    Args:
      x: This shard's tensor, of one shape and numeric type on all shards.
        Under a strategy, a floating point type.
      group_assignment: Lists of shard ids, [num_groups, shards_per_group].
        Default: None, one group of all shards.
      name: The name of the result. Default: none.

    Returns:
      The sum over this shard's group, of `x`'s shape. Outside `shard`, of a
      TPU and of a strategy, for example in `TPUEstimator.evaluate`: `x`.

    Raises:
      TypeError: If x has another type.
      ValueError: If group_assignment is invalid or does not fit the number of
        shards. In `shard`, if shards call it differently.
      RuntimeError: In a strategy's cross-replica context, and where shards or
        replicas can't communicate.
      LookupError: If a tf.GradientTape differentiates it in `shard`.

    Example:

    >>> def computation(x):
    ...     total = tf_xshard.compat.v1.cross_replica_sum(tf.reduce_sum(x))
    ...     return x / total
    >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    ...     (parts,) = tf_xshard.compat.v1.shard(
    ...         computation, [tf.constant([1.0, 2.0, 3.0, 2.0])], num_shards=2)
    ...     session.run(parts).tolist()
    [0.125, 0.25, 0.375, 0.25]

    Source: tf.compat.v1.tpu.cross_replica_sum.
    """
    if group_assignment is not None:
        group_assignment = group_assignment_lib.GroupAssignment(
            group_assignment
        )
    where = sums.current("cross_replica_sum")
    x = tf.convert_to_tensor(x)
    return where.sum_value(x, group_assignment, name)


def replace(team: traced_shards.Team) -> None:
    """Puts sums in the places of the marks of all shards."""
    operations = team.operations().values()
    for of_shard in operations:
        for one in of_shard:
            if one.type == "CrossReplicaSum":
                raise ValueError(
                    "The computation of shard() calls TensorFlow's own"
                    f" cross_replica_sum or CrossShardOptimizer ({one.name!r}),"
                    " which run on TPUs only. Use tf_xshard.compat.v1."
                    "cross_replica_sum and tf_xshard.compat.v1."
                    "CrossShardOptimizer."
                )
    marks = [list(filter(sums.is_mark, of_shard)) for of_shard in operations]
    counts = [len(of_shard) for of_shard in marks]
    if len(set(counts)) > 1:
        raise ValueError(
            f"Shards call cross_replica_sum {counts} times. Make the same calls"
            " in every shard."
        )
    for alike in zip(*marks, strict=True):
        parts = [mark.inputs[0] for mark in alike]
        described = [
            (str(part.shape), part.dtype.name, sums.groups_of(mark).to_list())
            for part, mark in zip(parts, alike, strict=True)
        ]
        if any(one != described[0] for one in described):
            raise ValueError(
                "Shards call cross_replica_sum with different shapes, types or"
                f" groups: {described}. Make the same calls in every shard."
            )
        for members in sums.groups_of(alike[0]):
            total = tf.add_n([parts[m] for m in members])
            for m in members:
                mark = alike[m].outputs[0]
                for reader in mark.consumers():
                    tensorflow_v1.replace_input(reader, mark, total)
