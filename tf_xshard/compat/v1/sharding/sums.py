"""Sums for CrossShardOptimizer and cross_replica_sum, wherever they run.

in shard()                 InShards     add_n over the shards of one graph
in a replica function      InReplicas   reducer.GradientReducer, group_reduce
in tf.compat.v1.tpu        OnTPU        cross_replica_sum, as in the original
anywhere else              Alone        one shard, so nothing to sum
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.compat.v1.sharding import traced_shards
from tf_xshard.distribute import indexed_slices
from tf_xshard.distribute import site as site_lib
from tf_xshard.optimizers import commit
from tf_xshard.private.tensorflow import v1 as tensorflow_v1
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import group_reduce
from tf_xshard.reduction import reducer as reducer_lib

# (gradient, variable) pairs of equal shapes.
Pairs = list[tuple[Any, Any]]
# A sum for each variable, and values that exist once all sums of all of this
# process's shards exist.
Sums = tuple[list[tf.Tensor | None], list[Any]]


class Alone:
    """Handles one shard, outside everything that combines gradients."""

    num_shards: int = 1
    # Errors name the owner of the shards with this text.
    description = "code outside of shard() and of a strategy"

    def groups(
        self, given: group_assignment_lib.GroupAssignment | None
    ) -> group_assignment_lib.GroupAssignment:
        """Returns the groups of the shards."""
        return group_assignment_lib.for_replicas(
            given, self.num_shards, self.description
        )

    def sum(
        self,
        gradients: Sequence[indexed_slices.Gradient],
        variables: Sequence[Any],
        reducer: reducer_lib.GradientReducer,
        given: group_assignment_lib.GroupAssignment | None,
    ) -> Sums:
        """Sums gradients over this shard's group."""
        del reducer, given
        sums = _dense(gradients, variables)
        return sums, sums

    def sum_value(
        self,
        x: tf.Tensor,
        given: group_assignment_lib.GroupAssignment | None,
        name: str | None,
    ) -> tf.Tensor:
        """Sums one tensor over this shard's group, with a gradient."""
        self.groups(given)
        return tf.identity(x, name)

    def updates(
        self,
        pairs: Pairs,
        global_step: Any,
        groups: group_assignment_lib.GroupAssignment,
    ) -> tuple[Pairs, Any]:
        """Selects the pairs and the global step that this shard updates."""
        del groups
        return pairs, global_step


class InReplicas(Alone):
    """Sums over the replicas of a strategy, in its replica function."""

    description = "the strategy"

    def __init__(self) -> None:
        self._site = site_lib.current()
        self.num_shards = self._site.num_replicas

    def sum(
        self,
        gradients: Sequence[indexed_slices.Gradient],
        variables: Sequence[Any],
        reducer: reducer_lib.GradientReducer,
        given: group_assignment_lib.GroupAssignment | None,
    ) -> Sums:
        """Sums gradients over this replica's group, as `Alone.sum` does."""
        values = gradients_lib.standardized(
            _dense(gradients, variables), variables
        )
        groups = self.groups(given)
        batch, _ = reducer.sum(
            gradients_lib.GradientBatch(values, list(variables)),
            self._site,
            groups,
        )
        sums = batch.values
        if groups.num_groups == 1:
            # A sum over one group needs the gradients of all replicas.
            return sums, sums
        return sums, [*sums, *commit.arrivals(sums, self._site)]

    def sum_value(
        self,
        x: tf.Tensor,
        given: group_assignment_lib.GroupAssignment | None,
        name: str | None,
    ) -> tf.Tensor:
        """Sums one tensor over this replica's group."""
        return tf.identity(group_reduce.group_reduce(x, given, "sum"), name)


class OnTPU(Alone):
    """Sums over the shards of tf.compat.v1.tpu.shard, replicate or rewrite."""

    description = "the TPU computation"

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards

    def sum(
        self,
        gradients: Sequence[indexed_slices.Gradient],
        variables: Sequence[Any],
        reducer: reducer_lib.GradientReducer,
        given: group_assignment_lib.GroupAssignment | None,
    ) -> Sums:
        """Sums gradients, of any shapes, with the original's operations."""
        groups = given and given.to_list()
        # The original takes the number of rows from a gradient that has a
        # dense_shape.
        gradients = [
            tf.convert_to_tensor(gradient)
            if getattr(gradient, "dense_shape", None) is not None
            else gradient
            for gradient in gradients
        ]
        summed = []
        for gradient in _dense(gradients, variables):
            if gradient is not None:
                with tf.compat.v1.colocate_with(gradient):
                    gradient = tf.compat.v1.tpu.cross_replica_sum(
                        gradient, groups
                    )
            summed.append(gradient)
        # A TPU's step is one program, which writes at its end.
        return summed, []

    def sum_value(
        self,
        x: tf.Tensor,
        given: group_assignment_lib.GroupAssignment | None,
        name: str | None,
    ) -> tf.Tensor:
        """Sums one tensor with the original's operation."""
        groups = self.groups(given).to_list()
        return tf.compat.v1.tpu.cross_replica_sum(x, groups, name)


class InShards(Alone):
    """Sums over the shards of `tf_xshard.compat.v1.shard`, in a computation."""

    description = "shard()"

    def __init__(self, shard: traced_shards.Shard) -> None:
        self._shard = shard
        self._copies = shard.team.copies
        self.num_shards = shard.team.num_shards

    def sum(
        self,
        gradients: Sequence[indexed_slices.Gradient],
        variables: Sequence[Any],
        reducer: reducer_lib.GradientReducer,
        given: group_assignment_lib.GroupAssignment | None,
    ) -> Sums:
        """Sums gradients of shards that may order variables differently."""
        dense = _dense(gradients, variables)
        for gradient, variable in zip(dense, variables, strict=True):
            if gradient is not None:
                gradient.shape.assert_is_compatible_with(variable.shape)
        keys = [self._copies.key(variable) for variable in variables]
        groups = self.groups(given)
        sums, all_exist = self._shard.exchange(
            dict(zip(keys, dense, strict=True)),
            lambda of_shards: _summed_in_groups(of_shards, groups),
        )
        return [sums[key] for key in keys], [all_exist]

    def sum_value(
        self,
        x: tf.Tensor,
        given: group_assignment_lib.GroupAssignment | None,
        name: str | None,
    ) -> tf.Tensor:
        """Marks one tensor to be summed once all shards are traced."""
        self._shard.team.check_place()
        return _marked(x, f"{_MARK}{self.groups(given).to_list()}", name)

    def updates(
        self,
        pairs: Pairs,
        global_step: Any,
        groups: group_assignment_lib.GroupAssignment,
    ) -> tuple[Pairs, Any]:
        """Selects the shard's variables; in shard 0, also shared variables."""
        shard = self._shard
        shared = [
            v.name for _, v in pairs if not self._copies.is_of(v, shard.index)
        ]
        if shared and groups.num_groups > 1:
            raise ValueError(
                f"Variables {shared} are made outside the computation of"
                f" shard(), so all shards share them, and {groups.num_groups}"
                " groups would update them differently. Make them inside the"
                " computation."
            )
        if global_step is not None and not shard.owns(global_step):
            global_step = None
        return [pair for pair in pairs if shard.owns(pair[1])], global_step


def current(caller: str = "CrossShardOptimizer") -> Alone:
    """Returns the object that sums for the calling code."""
    shard = traced_shards.current()
    if shard is not None:
        return InShards(shard)
    if tf.distribute.has_strategy():
        return InReplicas()
    number = tensorflow_v1.tpu_number_of_shards()
    if number is not None:
        return OnTPU(number)
    logging.log_first_n(
        logging.WARNING,
        "%s is used outside of shard(), of tf.compat.v1.tpu and of a strategy's"
        " replica function, so there is only one shard and nothing is summed.",
        1,
        caller,
    )
    return Alone()


# The mark of a sum over shards, before its groups. A tf.GradientTape shows it.
_MARK = (
    "tf.GradientTape can't differentiate cross_replica_sum in shard(). Use"
    " tf.gradients or an optimizer's compute_gradients in a tf.Graph. Groups: "
)
_GRADIENT = "TfXshardSumOverShards"


def _marked(x: tf.Tensor, message: str, name: str | None = None) -> tf.Tensor:
    """Makes a mark, and returns what reads it."""
    with tf.compat.v1.get_default_graph().gradient_override_map(
        {"PreventGradient": _GRADIENT}
    ):
        mark = tf.raw_ops.PreventGradient(input=x, message=message)
    return tf.identity(mark, name)


@tf.RegisterGradient(_GRADIENT)
def _gradient_of_sum(mark: tf.Operation, gradient: tf.Tensor) -> tf.Tensor:
    """Marks the gradient of a sum, which is the sum of the gradients."""
    return _marked(gradient, mark.get_attr("message").decode())


def is_mark(operation: tf.Operation) -> bool:
    """Returns True if an operation marks a tensor to sum over shards."""
    return operation.type == "PreventGradient" and operation.get_attr(
        "message"
    ).decode().startswith(_MARK)


def groups_of(mark: tf.Operation) -> group_assignment_lib.GroupAssignment:
    """Returns the groups of a mark."""
    text = mark.get_attr("message").decode().removeprefix(_MARK)
    return group_assignment_lib.GroupAssignment(json.loads(text))


def _dense(
    gradients: Sequence[indexed_slices.Gradient], variables: Sequence[Any]
) -> list[tf.Tensor | None]:
    """Makes gradients dense, in variables' shapes, as the original does."""
    return [
        indexed_slices.dense(gradient, variable)
        if isinstance(gradient, tf.IndexedSlices)
        else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _summed_in_groups(
    of_shards: Sequence[dict[int, tf.Tensor | None]],
    groups: group_assignment_lib.GroupAssignment,
) -> list[tuple[dict[int, tf.Tensor | None], tf.Operation]]:
    """Returns each shard's group sums, and what runs after all groups' sums."""
    for index, one in enumerate(of_shards):
        if one.keys() != of_shards[0].keys():
            raise ValueError(
                f"Shard {index} applies gradients to different variables than"
                " shard 0. All shards must run the same computation."
            )
    of_groups = [
        {
            key: indexed_slices.added(
                [of_shards[m][key] for m in members], None
            )
            for key in of_shards[0]
        }
        for members in groups
    ]
    all_exist = tf.group(
        *[
            total
            for sums in of_groups
            for total in sums.values()
            if total is not None
        ]
    )
    return [
        (of_groups[groups.group_of(i)], all_exist)
        for i in range(len(of_shards))
    ]
