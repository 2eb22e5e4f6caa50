"""Defines the aggregator that reduces gradients for tf_keras's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import reductions
from tf_xshard.distribute import lone_training
from tf_xshard.distribute import site as site_lib
from tf_xshard.optimizers import arguments
from tf_xshard.optimizers import commit
from tf_xshard.optimizers import hooks
from tf_xshard.private.tensorflow import autograph
from tf_xshard.private.tf_keras import optimizers as tf_keras_optimizers
from tf_xshard.reduction import error_feedback
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import loss_scaling
from tf_xshard.reduction import presence
from tf_xshard.reduction import reducer as reducer_lib

_NAME = "tf_xshard.tf_keras"


class SavedResiduals(tf.Module):
    """Holds the residuals of error feedback, for checkpoints."""

    def __init__(self) -> None:
        super().__init__(name="gradient_residuals")
        self._residuals = error_feedback.Residuals([])
        self.residuals: list = []

    def read(
        self, trained: Sequence, strategy: tf.distribute.Strategy
    ) -> reducer_lib.Carry:
        """Returns this replica's carry; creates the variables if needed."""
        if missing := self._residuals.missing(trained):
            # tf_keras calls its aggregator before it creates slot variables.
            with tf.init_scope(), site_lib.scope_of(strategy):
                self._residuals.add(missing)
                # A checkpoint that was read earlier fills them now.
                self.residuals.extend(
                    self._residuals.variables[len(self.residuals) :]
                )
        return self._residuals.read(1)

    def keep(self, carry: reducer_lib.Carry, finite: tf.Tensor | None) -> None:
        """Keeps a carry, unless the step is skipped."""
        self._residuals.keep(carry, finite)


class GradientAggregator(tf_keras_optimizers.Aggregator):
    """Reduces (gradient, variable) pairs over groups of replicas.

    `gradient_aggregator` and `with_aggregator` make it. tf_keras's optimizers
    call it in replica context.
    """

    def __init__(
        self,
        reduction: str,
        group_assignment: Any,
        loss_normalization: str | None,
        pre_reduce: hooks.GradientFunction | None,
        post_reduce: hooks.GradientFunction | None,
        communication: communication_lib.Communication | None,
        has_loss_scale: bool = False,
    ) -> None:
        arguments.check_loss_normalization(loss_normalization)
        if tf.distribute.has_strategy():
            site_lib.kind_of(tf.distribute.get_strategy())
        self._reduction = reductions.checked(reduction)
        self._group_assignment = arguments.checked_groups(group_assignment)
        self._undoes_division = loss_normalization != "replica"
        self._pre_hook = hooks.Hook("pre_reduce", pre_reduce)
        self._post_hook = hooks.Hook("post_reduce", post_reduce)
        self._reducer = arguments.checked_reducer(communication)
        self._has_loss_scale = (
            has_loss_scale or tf_keras_optimizers.uses_float16()
        )
        # The calls, also in traces, whose gradients have not been applied.
        self._num_reduced = 0
        self._needs_vote = self._reducer.communication.error_feedback
        # A checkpoint that gets `residuals` saves and restores them.
        self.residuals: SavedResiduals | None = None
        if self._reducer.communication.error_feedback:
            self.residuals = SavedResiduals()

    @autograph.entry_point
    def __call__(self, grads_and_vars: Iterable[tuple]) -> list[tuple]:
        """Reduces a list of (gradient, variable) pairs.

        Args:
          grads_and_vars: The pairs of this replica. A gradient is a tensor,
            `tf.IndexedSlices` or None.

        Returns:
          The pairs with reduced gradients, in the same order.
        """
        self._num_reduced += 1
        return self.reduced(list(grads_and_vars))

    def reduced(self, pairs: list[tuple]) -> list[tuple]:
        """Reduces (gradient, variable) pairs."""
        return self.update(pairs, lambda reduced: reduced)

    def update(
        self, pairs: list[tuple], apply: Callable[[list[tuple]], Any]
    ) -> Any:
        """Reduces (gradient, variable) pairs, and calls a function with them.

        What the function writes waits for the gradients of all replicas of this
        process, and for their reduction.
        """
        if not pairs:
            return apply(pairs)
        site = site_lib.current()
        lone_training.refuse(site.strategy, f"{_NAME} reduces gradients")
        groups = group_assignment_lib.for_replicas(
            self._group_assignment,
            site.num_replicas,
            f"the strategy {type(site.strategy).__name__}",
        )
        variables = [variable for _, variable in pairs]
        arrived = gradients_lib.GradientBatch(
            gradients_lib.standardized([g for g, _ in pairs], variables),
            variables,
        )
        site, waits_for = commit.begin(
            arrived.values, [], [groups], site, _NAME
        )
        batch, carry, finite = self._reduced(arrived, site, groups)
        with commit.gate([*waits_for, *batch.values, finite]):
            if self.residuals is not None:
                self.residuals.keep(carry, finite)
            return apply(batch.pairs())

    def _reduced(
        self,
        arrived: gradients_lib.GradientBatch,
        site: site_lib.Site,
        groups: group_assignment_lib.GroupAssignment,
    ) -> tuple[
        gradients_lib.GradientBatch, reducer_lib.Carry, tf.Tensor | None
    ]:
        """Also returns the rounding errors, and whether replicas may skip."""
        batch = arrived
        if self._undoes_division:
            batch = batch.scaled(site.num_replicas)
        # tf_keras's LossScaleOptimizer has divided the loss scale out.
        batch = self._pre_hook(batch, _unscaled)
        carry, finite = None, None
        if self.residuals is not None:
            carry = self.residuals.read(arrived.variables, site.strategy)
        batch, carry = self._reducer.all_reduce(
            batch, site, groups, self._reduction, carry
        )
        batch = self._post_hook(batch, _unscaled)
        if groups.num_groups > 1:
            _check_updates(batch, site)
        self._needs_vote = groups.num_groups > 1 or self.residuals is not None
        if self._has_loss_scale and self._needs_vote:
            # A LossScaleOptimizer asks replica 0 whether all skip the step.
            finite = loss_scaling.all_replicas_finite(
                [*arrived.values, *batch.values],
                site,
                self._reducer.channel(groups),
            )
            batch = batch.with_values(
                loss_scaling.nan_unless(finite, batch.values)
            )
        return batch, carry, finite

    def begin_update(self) -> None:
        """Takes note that a replica applies gradients that a caller reduced.

        Raises:
          RuntimeError: If no gradients have been reduced, or if another
            optimizer may skip the step on a part of the replicas.
        """
        if not self._num_reduced:
            raise RuntimeError(
                "apply_gradients was told not to aggregate gradients, but"
                " with_aggregator's optimizer has not aggregated them, so each"
                " replica would train separately. Leave out"
                " skip_gradients_aggregation=True (and"
                " experimental_aggregate_gradients=False)."
            )
        self._num_reduced -= 1
        if self._needs_vote and not self._has_loss_scale:
            raise RuntimeError(
                "apply_gradients was told not to aggregate gradients, as by a"
                " LossScaleOptimizer that with_aggregator did not get. With"
                " several groups or error feedback, replicas might skip a step"
                " separately. Pass the LossScaleOptimizer to with_aggregator."
                " To change reduced gradients, pass post_reduce."
            )


def _check_updates(
    batch: gradients_lib.GradientBatch, site: site_lib.Site
) -> None:
    """Raises ValueError if only some groups would update a variable.

    tf_keras updates a variable on all replicas of a process in one merge_call.
    """
    patterns = presence.local_patterns(batch.values, batch.variables, site)
    for entries in zip(*patterns, strict=True):
        first = site.rank * site.num_local_replicas
        lacking = [
            replica_id
            for replica_id, entry in enumerate(entries, first)
            if entry.kind == presence.NONE
        ]
        if lacking and len(lacking) < len(entries):
            raise ValueError(
                f"No replica of a group has a gradient for {entries[0].name!r},"
                " but another group has one (replicas without one:"
                f" {lacking}). tf_keras updates a variable in all groups or in"
                " none. Pass zeros instead of None, or use Keras 3 and"
                " CrossShardOptimizer, which leaves the variable as it is."
            )


def _unscaled(loss: float) -> float:
    return loss


def gradient_aggregator(
    reduction: str = "mean",
    group_assignment: (
        group_assignment_lib.GroupAssignment | Sequence | np.ndarray | None
    ) = None,
    *,
    loss_normalization: str | None = None,
    pre_reduce: hooks.GradientFunction | None = None,
    post_reduce: hooks.GradientFunction | None = None,
    communication: communication_lib.Communication | None = None,
) -> GradientAggregator:
    """Makes the `gradient_aggregator` argument of a legacy tf_keras optimizer.

    The optimizer then reduces gradients over groups of replicas, instead of
    summing them over all. Its clipping acts on the reduced gradient.

    Args:
      reduction: `"mean"` (default) or `"sum"` of the losses of a group's
        replicas.
      group_assignment: A `GroupAssignment`, or a `[num_groups,
        replicas_per_group]` nested list of replica ids. None (default) for one
        group of all replicas.
      loss_normalization: `"global"` (as None, the default) if the loss was
        divided by the number of replicas, as by `fit` and
        `tf.nn.compute_average_loss`. `"replica"` if it was not.
      pre_reduce: A callable that gets each replica's list of (gradient,
        variable) pairs before the reduction, and returns a list of pairs for
        the same variables. None (default) does nothing.
      post_reduce: A callable like `pre_reduce`, for the reduced gradients.
      communication: A `Communication`. None (default) for its defaults.

    Returns:
      A callable of a list of (gradient, variable) pairs. It is not saved with
      the optimizer. With error feedback, its attribute `residuals` is a
      `tf.Module` to save: `tf.train.Checkpoint(...,
      residuals=aggregator.residuals)`. With a LossScaleOptimizer, and error
      feedback or several groups, use `with_aggregator`, unless the global
      policy is `"mixed_float16"`.

    Raises:
      TypeError: If an argument has the wrong type.
      ValueError: If an argument is invalid, or does not fit the strategy.

    Example:

    >>> import tf_keras
    >>> aggregator = tf_xshard.tf_keras.gradient_aggregator("mean")
    >>> optimizer = tf_keras.optimizers.legacy.Adam(
    ...     0.01, gradient_aggregator=aggregator)

    Source: `tf_keras.optimizers.legacy.Optimizer`;
    `tf.compat.v1.tpu.CrossShardOptimizer`.
    """
    return GradientAggregator(
        reduction,
        group_assignment,
        loss_normalization,
        pre_reduce,
        post_reduce,
        communication,
    )


def with_aggregator(
    optimizer: Any,
    reduction: str = "mean",
    group_assignment: (
        group_assignment_lib.GroupAssignment | Sequence | np.ndarray | None
    ) = None,
    *,
    loss_normalization: str | None = None,
    pre_reduce: hooks.GradientFunction | None = None,
    post_reduce: hooks.GradientFunction | None = None,
    communication: communication_lib.Communication | None = None,
) -> Any:
    """Makes a tf_keras optimizer reduce gradients over groups of replicas.

    It works for optimizers of `tf_keras.optimizers` and
    `tf_keras.optimizers.legacy`, and for a `LossScaleOptimizer` or Model
    Garden's `ExponentialMovingAverage` around one.

    Args:
      optimizer: A tf_keras optimizer that has not been given an aggregator.
      reduction: See `gradient_aggregator`.
      group_assignment: See `gradient_aggregator`.
      loss_normalization: See `gradient_aggregator`.
      pre_reduce: See `gradient_aggregator`.
      post_reduce: See `gradient_aggregator`.
      communication: See `gradient_aggregator`.

    Returns:
      The same optimizer. Its checkpoints (`tf.train.Checkpoint`) have the
      residuals of error feedback. A loaded or cloned optimizer has no
      aggregator. Call `with_aggregator` again.

    Raises:
      TypeError: If an argument has the wrong type, `optimizer` is not of
        tf_keras, or it already aggregates gradients in its own way.
      ValueError: If an argument is invalid, or does not fit the strategy.

    Example:

    >>> import tf_keras
    >>> optimizer = tf_xshard.tf_keras.with_aggregator(
    ...     tf_keras.optimizers.Adam(0.01), group_assignment=[[0]])

    Source: `tf_keras.optimizers.Optimizer.aggregate_gradients`;
    `tf.compat.v1.tpu.CrossShardOptimizer`.
    """
    inner = tf_keras_optimizers.unwrapped(optimizer)
    aggregator = GradientAggregator(
        reduction,
        group_assignment,
        loss_normalization,
        pre_reduce,
        post_reduce,
        communication,
        has_loss_scale=tf_keras_optimizers.scales_loss(optimizer),
    )
    tf_keras_optimizers.replace_sum(inner, aggregator)
    return optimizer
