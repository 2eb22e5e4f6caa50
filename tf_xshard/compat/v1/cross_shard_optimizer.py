"""`tf.compat.v1.tpu.CrossShardOptimizer`, with and without a TPU."""

from __future__ import annotations

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
from tf_xshard.reduction import group_sum as reduction_lib

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
        self._groups = (
            None if group_assignment is None else _groups(group_assignment)
        )
        self._reduction = reduction
        self._communication = communication_lib.Communication()
        self._known_patterns = {}
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
        loss = inner_optimizers.converted(loss)
        size = self._groups_here(_where()).group_size
        if _where().num_shards > 1 and self._reduction == Reduction.MEAN:
            loss = _scaled(loss, 1.0 / size)
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
        if where.kind == "tpu":
            summed = self._sum_on_tpu(pairs)
        else:
            gradients = [_dense(g, v) for g, v in pairs]
            if where.kind == "shards":
                summed = _sum_over_shards(
                    where.shard, gradients, variables, groups
                )
            elif where.kind == "replicas":
                summed = reduction_lib.group_sum(
                    reduction_lib.standardized(gradients, variables),
                    variables,
                    here=where.here,
                    groups=groups,
                    communication=self._communication,
                    known_patterns=self._known_patterns,
                )
            else:
                summed = gradients
        pairs = list(zip(summed, variables, strict=True))
        if where.kind == "shards":
            pairs, global_step = _owned(
                where.shard, pairs, global_step, groups.num_groups
            )
            if not pairs:
                return tf.no_op(name or self._name)
        return self._inner_here().apply(
            pairs, global_step, name=name or self._name
        )

    def _sum_on_tpu(self, pairs):
        groups = self._groups and self._groups.to_list()
        summed = []
        for gradient, variable in pairs:
            if gradient is not None:
                if getattr(gradient, "dense_shape", None) is not None:
                    gradient = tf.convert_to_tensor(gradient)
                gradient = _dense(gradient, variable)
                with tf.compat.v1.colocate_with(gradient):
                    gradient = tf.compat.v1.tpu.cross_replica_sum(
                        gradient, groups
                    )
            summed.append(gradient)
        return summed

    def _groups_here(self, where) -> group_assignment_lib.GroupAssignment:
        if self._groups is None:
            return group_assignment_lib.GroupAssignment.contiguous(
                where.num_shards, where.num_shards
            )
        if self._groups.num_replicas != where.num_shards:
            raise ValueError(
                f"group_assignment {self._groups.to_list()} must be a"
                f" permutation of range({where.num_shards}), the number of"
                " shards or replicas here."
            )
        return self._groups

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


class _Where:
    """What combines gradients here, and over how many shards."""

    def __init__(self, kind, num_shards, shard=None, here=None):
        self.kind = kind
        self.num_shards = num_shards
        self.shard = shard
        self.here = here


def _where() -> _Where:
    shard = shard_team.current()
    if shard is not None:
        return _Where("shards", shard.team.num_shards, shard=shard)
    if tf.distribute.has_strategy():
        here = replica_context.current()
        return _Where("replicas", here.num_replicas, here=here)
    number = tensorflow_v1.tpu_number_of_shards()
    if number is not None:
        return _Where("tpu", number)
    logging.log_first_n(
        logging.WARNING,
        "CrossShardOptimizer is used outside of shard(), of tf.compat.v1.tpu"
        " and of a strategy's replica function: there is one shard.",
        1,
    )
    return _Where("alone", 1)


def _groups(group_assignment) -> group_assignment_lib.GroupAssignment:
    try:
        if isinstance(group_assignment, group_assignment_lib.GroupAssignment):
            return group_assignment
        return group_assignment_lib.GroupAssignment(group_assignment)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _scaled(loss, factor: float):
    if callable(loss) and not tf.is_tensor(loss):
        return lambda: loss() * factor
    if loss is None or isinstance(loss, (list, tuple)):
        raise TypeError(f"loss must be a tensor or a function, got {loss!r}.")
    return loss * factor


def _dense(gradient, variable):
    """As the original does: the inner optimizer always takes its dense path."""
    if isinstance(gradient, tf.IndexedSlices):
        return indexed_slices.dense(gradient, variable)
    return gradient


def _sum_over_shards(shard, gradients, variables, groups) -> list:
    """Sums by variable; shards may give them in another order."""
    copies = shard.team.copies
    keys = [copies.key(variable) for variable in variables]

    def combined(of_shards):
        for index, one in enumerate(of_shards):
            if one.keys() != of_shards[0].keys():
                raise ValueError(
                    f"Shard {index} applies gradients to other variables than"
                    " shard 0. All shards must run the same computation."
                )
        results = [None] * len(of_shards)
        for members in groups:
            sums = {}
            for number in of_shards[0]:
                column = [of_shards[member][number] for member in members]
                present = [
                    gradient for gradient in column if gradient is not None
                ]
                sums[number] = tf.add_n(present) if present else None
            for member in members:
                results[member] = sums
        return results

    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is not None:
            gradient.shape.assert_is_compatible_with(variable.shape)
    sums = shard.meet(dict(zip(keys, gradients, strict=True)), combined)
    return [sums[number] for number in keys]


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
