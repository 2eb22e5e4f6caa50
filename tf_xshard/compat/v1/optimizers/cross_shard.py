"""Defines `tf.compat.v1.tpu.CrossShardOptimizer`, with and without a TPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import reductions
from tf_xshard.compat.v1.optimizers import base as wrapper
from tf_xshard.compat.v1.optimizers import inner_optimizers
from tf_xshard.compat.v1.sharding import sums as shard_sums
from tf_xshard.compat.v1.sharding import traced_shards
from tf_xshard.private.tensorflow import autograph
from tf_xshard.private.tensorflow import v1 as tensorflow_v1
from tf_xshard.reduction import reducer as reducer_lib

Reduction = tf.compat.v1.losses.Reduction
_REDUCTIONS = (Reduction.SUM, Reduction.MEAN)


class CrossShardOptimizer(wrapper.Wrapper):
    """Averages or sums gradients across shards or replicas.

    This class is the documented `tf.compat.v1.tpu.CrossShardOptimizer`. The
    original runs only on a TPU. This optimizer runs:

    - in `tf.compat.v1.tpu.shard`, `replicate` and `rewrite`, where it builds
      the original's operations;
    - in `tf_xshard.compat.v1.shard`, without a TPU;
    - in a `tf.distribute` strategy's replica function (graph, `tf.function` or
      eager), where it sums once over the groups, and the inner optimizer does
      not sum;
    - anywhere else, as one shard.

    `compute_gradients` divides the loss by the group size if the reduction is
    MEAN, and `apply_gradients` sums. Between the two calls, each shard can clip
    its gradients; choose the bound for the divided gradients. Gradients from
    other sources are summed without a division.

    Args:
      opt: The v1 optimizer to wrap. In a `tf.function` or in eager mode, it can
        be a Keras optimizer. A wrapped optimizer does not sum over replicas
        itself.
      reduction: The reduction to apply to the shard losses,
        `tf.compat.v1.losses.Reduction.MEAN` (default) or `SUM`.
      name: The update operation's name. Default: "CrossShardOptimizer".
      group_assignment: Lists of shard ids, [num_groups, shards_per_group].
        Gradients are combined within each group. Default: None, one group.

    Raises:
      ValueError: If reduction, name or group_assignment is invalid.
      TypeError: If opt is not an optimizer, or a Keras optimizer in a tf.Graph.

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
        group_assignment: Sequence[Sequence[int]]
        | group_assignment_lib.GroupAssignment
        | None = None,
    ) -> None:
        if reduction not in _REDUCTIONS:
            raise ValueError(
                f"reduction must be one of {_REDUCTIONS} (tf.compat.v1.losses."
                f"Reduction), got {reduction!r}."
            )
        self._inner = inner_optimizers.of(opt)
        self._inner.leave_out_the_sum()
        super().__init__(False, name)
        self._given_groups = (
            None if group_assignment is None else _groups(group_assignment)
        )
        self._reducer = reducer_lib.GradientReducer(
            communication_lib.Communication()
        )
        self._reduction = reductions.checked(reduction)
        # The graphs with copies of the inner optimizer, which they keep.
        self._graphs: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
        self._track(self._inner)

    @autograph.entry_point
    def compute_gradients(
        self, loss: Any, var_list: Any = None, **kwargs: Any
    ) -> list[tuple[Any, Any]]:
        """Computes this shard's gradients of the scaled loss.

        Args:
          loss: A scalar tensor or, in a `tf.function` and eagerly, a function
            without arguments that returns a scalar tensor.
          var_list: The variables. Default: the graph's trainable variables, or
            the variables that the function uses.
          **kwargs: Passed to the inner optimizer's `compute_gradients`.

        Returns:
          A list of (gradient, variable) pairs of equal shapes. The gradients
          are not yet summed. With MEAN, the loss was divided by the group size.

        Raises:
          TypeError, ValueError: If the loss is not a floating-point tensor.
          ValueError: If group_assignment does not fit the number of shards.
          RuntimeError: If the loss is not a function in eager mode. In a
            strategy's cross-replica context.

        Example: see the class.
        """
        where = shard_sums.current()
        groups = where.groups(self._given_groups)
        divisor = self._reduction.of_sum(groups.group_size)
        if divisor != 1:
            loss = wrapper.map_loss(lambda x: x * (1.0 / divisor), loss)
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

    @autograph.entry_point
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
    ) -> tf.Operation | None:
        """Sums gradients over the group and applies the sums.

        Args:
          grads_and_vars: An iterable of (gradient, variable) pairs of equal
            shapes, such as `compute_gradients` returns. IndexedSlices are made
            dense. A missing gradient (None) counts as zero if another shard of
            the group has a gradient for the variable.
          global_step: A scalar variable to increment by one after the update.
            Default: None.
          name: The name of the operation. Default: the constructor's.

        Returns:
          The operation that applies the gradients and increments global_step.
          None in eager mode.

        Raises:
          ValueError: If grads_and_vars is empty, malformed or has no gradient,
            or if group_assignment does not fit the number of shards.
          TypeError: If a gradient's type is not a supported numeric type.
          RuntimeError: In a strategy's cross-replica context, and where shards
            or replicas can't communicate.

        Example: see the class.
        """
        pairs = wrapper.tensors_of(wrapper.pairs_of(grads_and_vars))
        variables = [v for _, v in pairs]
        where = shard_sums.current()
        groups = where.groups(self._given_groups)
        summed, exist = where.sum(
            [g for g, _ in pairs], variables, self._reducer, self._given_groups
        )
        pairs = list(zip(summed, variables, strict=True))
        pairs, global_step = where.updates(pairs, global_step, groups)
        if not pairs:
            return tf.no_op(name or self.get_name())
        return self._apply_inner(
            exist, pairs, global_step, name=name or self.get_name()
        )

    def _inner_here(self) -> inner_optimizers.V1 | inner_optimizers.Keras:
        shard = traced_shards.current()
        if shard is None:
            return self._inner
        owners = {
            shard.team.copies.owner(one, shard.index)
            for one in tensorflow_v1.optimizers_in(self._inner.optimizer)
        }
        if owners == {shard.index}:
            return self._inner
        # The inner optimizer already has another shard's state.
        copies = self._copies_in(shard.team.graph)
        if shard.index not in copies:
            copies[shard.index] = self._inner.anew()
        return copies[shard.index]

    def _copies_in(self, graph: tf.Graph) -> dict[int, Any]:
        """Returns the copies of the inner optimizer for a graph's shards."""
        self._graphs.add(graph)
        return tensorflow_v1.kept_by(
            graph, "tf_xshard_inner_of_shards", weakref.WeakKeyDictionary
        ).setdefault(self, {})

    def get_slot(self, *args: Any, **kwargs: Any) -> tf.Variable | None:
        """Returns a slot of the inner optimizer, for any shard's variable.

        Args:
          *args: `var` and `name`, as the inner optimizer takes them.
          **kwargs: `var` and `name`, as keyword arguments.

        Returns:
          A variable, usually of `var`'s shape, or None if there is no slot.
        """
        copies = [
            one
            for graph in self._graphs
            for one in self._copies_in(graph).values()
        ]
        for inner in (self._inner, *copies):
            slot = inner.get_slot(*args, **kwargs)
            if slot is not None:
                return slot
        return None


def _groups(
    group_assignment: Sequence[Sequence[int]]
    | group_assignment_lib.GroupAssignment,
) -> group_assignment_lib.GroupAssignment:
    try:
        if isinstance(group_assignment, group_assignment_lib.GroupAssignment):
            return group_assignment
        return group_assignment_lib.GroupAssignment(group_assignment)
    except TypeError as error:
        raise ValueError(str(error)) from error
