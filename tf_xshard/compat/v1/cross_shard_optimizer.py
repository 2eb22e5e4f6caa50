"""`tf.compat.v1.tpu.CrossShardOptimizer`, with and without a TPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.compat.v1 import inner_optimizers
from tf_xshard.compat.v1 import shard_team
from tf_xshard.compat.v1 import wrapper
from tf_xshard.distribute import indexed_slices
from tf_xshard.distribute import replica_context
from tf_xshard.private import tensorflow as private_tensorflow
from tf_xshard.private import tensorflow_v1
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import group_sum

Reduction = tf.compat.v1.losses.Reduction
_REDUCTIONS = (Reduction.SUM, Reduction.MEAN)


class CrossShardOptimizer(wrapper.Wrapper):
    """An optimizer that averages gradients across shards or replicas.

    The documented `tf.compat.v1.tpu.CrossShardOptimizer`, which runs on a TPU
    only. This one runs

    - in `tf.compat.v1.tpu.shard`, `replicate` and `rewrite`, where it builds
      what the original builds,
    - in `tf_xshard.compat.v1.shard`, with no TPU,
    - in the replica function of a `tf.distribute` strategy, in a graph, in a
      `tf.function` and eagerly; it sums once, over the groups, and the inner
      optimizer does not sum again,
    - outside of these, where there is one shard.

    `compute_gradients` scales the loss by one over the group size if the
    reduction is MEAN, and `apply_gradients` sums. Gradients can be clipped in
    between, on each shard by itself; the factor must be taken into account.
    Gradients that come from elsewhere are summed as they are.

    Args:
      opt: The optimizer to encapsulate: a v1 optimizer, or in a `tf.function`
        and eagerly a Keras one. It leaves its own sum over replicas out from
        now on.
      reduction: The reduction to apply to the shard losses,
        `tf.compat.v1.losses.Reduction.MEAN` (default) or `SUM`.
      name: The name of the operation that applies gradients. Default:
        "CrossShardOptimizer".
      group_assignment: Lists of shard ids, [num_groups, shards_per_group]: the
        groups in which gradients are combined. Default: None, all shards are
        one group.

    Raises:
      ValueError: If reduction, name or group_assignment is invalid.
      TypeError: If opt is no optimizer, or a Keras one in a tf.Graph.

    Example:

    >>> def computation(x):
    ...     w = tf.compat.v1.get_variable("w", [], initializer=
    ...         tf.compat.v1.zeros_initializer())
    ...     optimizer = tf_xshard.compat.v1.CrossShardOptimizer(
    ...         tf.compat.v1.train.GradientDescentOptimizer(1.0))
    ...     return optimizer.minimize(tf.reduce_mean(-x * w))
    >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    ...     step = tf_xshard.compat.v1.shard(
    ...         computation, [tf.constant([1.0, 2.0, 3.0, 6.0])], num_shards=2)
    ...     session.run(tf.compat.v1.global_variables_initializer())
    ...     _ = session.run(step)
    ...     float(session.run(tf.compat.v1.trainable_variables()[0]))
    3.0

    Source: tf.compat.v1.tpu.CrossShardOptimizer.
    """

    def __init__(
        self,
        opt: tf.compat.v1.train.Optimizer | keras.optimizers.Optimizer,
        reduction: str = Reduction.MEAN,
        name: str = "CrossShardOptimizer",
        group_assignment: list | None = None,
    ):
        if reduction not in _REDUCTIONS:
            raise ValueError(
                f"reduction must be one of {_REDUCTIONS} (tf.compat.v1.losses."
                f"Reduction), got {reduction!r}."
            )
        self._inner = inner_optimizers.of(opt)
        self._inner.leave_out_the_sum()
        super().__init__(False, name)
        groups = None if group_assignment is None else _groups(group_assignment)
        self._reducer = group_sum.GroupReducer(
            groups, communication_lib.Communication()
        )
        self._reduction = reduction
        # By graph and shard: what is used in place of an inner optimizer that
        # works for another shard.
        self._inner_of_shard = {}
        self._track(self._inner)

    @private_tensorflow.entry_point
    def compute_gradients(self, loss, var_list=None, **kwargs) -> list:
        """Computes this shard's gradients of the scaled loss.

        Args:
          loss: A tensor, or in a `tf.function` and eagerly a function without
            arguments that returns one.
          var_list: The variables. Default: the trainable ones of the graph, or
            those that the function uses.
          **kwargs: Further arguments of the inner optimizer's
            `compute_gradients`.

        Returns:
          A list of (gradient, variable) pairs. With MEAN, gradients are those
          of the loss divided by the group size. They are not yet summed.

        Raises:
          TypeError: If the loss is no floating point tensor.
          ValueError: If group_assignment does not fit the number of shards.
          RuntimeError: In eager mode with a loss that is no function; in the
            cross-replica context of a strategy.

        Example: see the class.
        """
        where = _where()
        size = self._groups_here(where).group_size
        if where.num_shards > 1 and self._reduction == Reduction.MEAN:
            loss = inner_optimizers.map_loss(lambda x: x * (1.0 / size), loss)
        inner = self._inner
        if isinstance(inner, inner_optimizers.V1):
            inner = self._inner_here()
        return inner_optimizers.compute_gradients(
            inner,
            super().compute_gradients,
            loss,
            var_list,
            **kwargs,
        )

    @private_tensorflow.entry_point
    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """Sums gradients over the group, and applies them.

        Args:
          grads_and_vars: (gradient, variable) pairs, such as
            `compute_gradients` returns; anything that can be iterated over
            once. IndexedSlices are made dense. A gradient that another shard of
            the group has and this one has not counts as zero.
          global_step: A variable that is incremented by one after the update.
            Default: none.
          name: The name of the operation. Default: the constructor's.

        Returns:
          The operation that applies the gradients, and increments the step.
          None in eager mode.

        Raises:
          ValueError: If grads_and_vars is empty, malformed or has no gradient,
            or if group_assignment does not fit the number of shards.
          TypeError: If a gradient is no number of a supported type.
          RuntimeError: In the cross-replica context of a strategy, and where
            shards or replicas can't meet.

        Example: see the class.
        """
        pairs = inner_optimizers.tensors_of(
            inner_optimizers.pairs_of(grads_and_vars)
        )
        variables = [v for _, v in pairs]
        where = _where()
        groups = self._groups_here(where)
        summed = where.sum([g for g, _ in pairs], variables, self._reducer)
        pairs = list(zip(summed, variables, strict=True))
        if isinstance(where, _InShards):
            pairs, global_step = _owned(
                where.shard, pairs, global_step, groups.num_groups
            )
            if not pairs:
                return tf.no_op(name or self.get_name())
        return self._inner_here().apply(
            pairs, global_step, name=name or self.get_name()
        )

    def _groups_here(
        self, where: _Alone
    ) -> group_assignment_lib.GroupAssignment:
        return self._reducer.groups(where.num_shards, where.description)

    def _inner_here(self):
        shard = shard_team.current()
        if shard is None:
            return self._inner
        place = (shard.team.graph, shard.index)
        if place not in self._inner_of_shard:
            owners = {
                shard.team.copies.owner(one, shard.index)
                for one in tensorflow_v1.optimizers_in(self._inner.optimizer)
            }
            self._inner_of_shard[place] = (
                self._inner if owners == {shard.index} else self._inner.anew()
            )
        return self._inner_of_shard[place]

    def get_slot(self, *args, **kwargs):
        """Returns a slot of the inner optimizer, for any shard's variable.

        Args:
          *args: `var` and `name`, as the inner optimizer takes them.
          **kwargs: The same by name.

        Returns:
          The variable, or None if there is none yet.
        """
        for inner in (self._inner, *self._inner_of_shard.values()):
            slot = inner.get_slot(*args, **kwargs)
            if slot is not None:
                return slot
        return None


class _Alone:
    """Outside of all that combines gradients there is one shard."""

    num_shards = 1
    description = "what is outside of shard() and of a strategy"

    def sum(
        self,
        gradients: Sequence,
        variables: Sequence,
        reducer: group_sum.GroupReducer,
    ) -> list:
        """Sums gradients over this shard's group.

        Args:
          gradients: Tensors of the variables' shapes, IndexedSlices or None.
          variables: The variables.
          reducer: Knows the groups.

        Returns:
          Tensors of the variables' shapes, or None.
        """
        del reducer
        return _dense(gradients, variables)


class _InReplicas(_Alone):
    """In the replica function of a strategy."""

    description = "the strategy"

    def __init__(self) -> None:
        self._here = replica_context.current()
        self.num_shards = self._here.num_replicas

    def sum(
        self,
        gradients: Sequence,
        variables: Sequence,
        reducer: group_sum.GroupReducer,
    ) -> list:
        """See `_Alone.sum`."""
        gradients = _dense(gradients, variables)
        return reducer.sum(
            gradients_lib.standardized(gradients, variables),
            variables,
            self._here,
        )


class _OnTPU(_Alone):
    """In tf.compat.v1.tpu.shard and the like."""

    description = "the TPU computation"

    def __init__(self, num_shards: int):
        self.num_shards = num_shards

    def sum(
        self,
        gradients: Sequence,
        variables: Sequence,
        reducer: group_sum.GroupReducer,
    ) -> list:
        """See `_Alone.sum`; builds what the original builds."""
        groups = reducer.group_assignment and reducer.group_assignment.to_list()
        # The original takes the number of rows from the gradient, if it has it.
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
        return summed


class _InShards(_Alone):
    """In the computation of `shard`."""

    description = "shard()"

    def __init__(self, shard: shard_team.Shard):
        self.shard = shard
        self.num_shards = shard.team.num_shards

    def sum(
        self,
        gradients: Sequence,
        variables: Sequence,
        reducer: group_sum.GroupReducer,
    ) -> list:
        """See `_Alone.sum`; shards may give variables in another order."""
        gradients = _dense(gradients, variables)
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                gradient.shape.assert_is_compatible_with(variable.shape)
        keys = [self.shard.team.copies.key(v) for v in variables]
        groups = reducer.groups(self.num_shards, self.description)
        sums = self.shard.exchange(
            dict(zip(keys, gradients, strict=True)),
            lambda of_shards: _summed_in_groups(of_shards, groups),
        )
        return [sums[key] for key in keys]


def _where() -> _Alone:
    """What combines gradients here, and over how many shards."""
    shard = shard_team.current()
    if shard is not None:
        return _InShards(shard)
    if tf.distribute.has_strategy():
        return _InReplicas()
    number = tensorflow_v1.tpu_number_of_shards()
    if number is not None:
        return _OnTPU(number)
    logging.log_first_n(
        logging.WARNING,
        "CrossShardOptimizer is used outside of shard(), of tf.compat.v1.tpu"
        " and of a strategy's replica function: there is one shard.",
        1,
    )
    return _Alone()


def _groups(group_assignment) -> group_assignment_lib.GroupAssignment:
    try:
        if isinstance(group_assignment, group_assignment_lib.GroupAssignment):
            return group_assignment
        return group_assignment_lib.GroupAssignment(group_assignment)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _dense(gradients: Sequence, variables: Sequence) -> list:
    """As in the original the inner optimizer always takes its dense path."""
    return [
        indexed_slices.dense(gradient, variable)
        if isinstance(gradient, tf.IndexedSlices)
        else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _summed_in_groups(
    of_shards: Sequence[dict[int, Any]],
    groups: group_assignment_lib.GroupAssignment,
) -> list[dict[int, Any]]:
    """Each shard's sums over its group, by the numbers of variables."""
    for index, one in enumerate(of_shards):
        if one.keys() != of_shards[0].keys():
            raise ValueError(
                f"Shard {index} applies gradients to other variables than"
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
    return [of_groups[groups.group_of(i)] for i in range(len(of_shards))]


def _owned(shard, pairs, global_step, num_groups) -> tuple[list, object]:
    """What this shard updates: its own variables; shard 0 also shared ones."""
    shared = [
        v.name for _, v in pairs if not shard.team.copies.is_of(v, shard.index)
    ]
    if shared and num_groups > 1:
        raise ValueError(
            f"Variables {shared} are made outside the computation of shard(),"
            f" so all shards share them, and {num_groups} groups would update"
            " them differently. Make them inside."
        )
    if global_step is not None and not shard.owns(global_step):
        global_step = None
    return [pair for pair in pairs if shard.owns(pair[1])], global_step
