"""Defines `CrossShardOptimizer`, which reduces gradients over groups."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import checks
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import reductions
from tf_xshard.collectives import recorder
from tf_xshard.distribute import ownership
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import variable_role
from tf_xshard.optimizers import arguments
from tf_xshard.optimizers import base
from tf_xshard.optimizers import hooks
from tf_xshard.optimizers import local_variables as local_lib
from tf_xshard.optimizers import run as run_lib
from tf_xshard.optimizers import skipping
from tf_xshard.optimizers import stack
from tf_xshard.optimizers.update import kinds
from tf_xshard.optimizers.update import sharded
from tf_xshard.private.keras import optimizer_state
from tf_xshard.private.keras import shards as keras_shards
from tf_xshard.reduction import error_feedback
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import loss_scaling
from tf_xshard.reduction import reducer as reducer_lib


@keras.saving.register_keras_serializable("tf_xshard")
class CrossShardOptimizer(base.GradientWrapper):
    """Reduces gradients over groups of replicas for an inner optimizer.

    Use it to train several replicas like one device with the global batch, up
    to rounding. You can also train groups of replicas independently (ensembles,
    populations, teams). Do not use it under ParameterServerStrategy, whose
    workers are not synchronized.

    ```
    group_assignment=[[0, 1], [2, 3]], reduction="mean"

    replica                  0             1             2             3
    own gradient             g0            g1            g2            g3
    pre_reduce          f(g0)         f(g1)         f(g2)         f(g3)
    group reduction     (g0+g1)/2     (g0+g1)/2     (g2+g3)/2     (g2+g3)/2
    post_reduce, inner  the same step on 0 and 1,   the same step on 2 and 3
    weights                  w             w             v             v
    ```

    The wrapper reduces gradients once. The inner optimizer's clipping, weight
    decay, moving averages, accumulation and loss scaling act on the reduced
    gradient, on each replica, without another reduction.

    Args:
      inner_optimizer: A `keras.optimizers.Optimizer` that gets the reduced
        gradients, created in the same strategy scope. It then belongs to the
        wrapper and does not reduce gradients itself.
      reduction: `"mean"` (default) or `"sum"` of the losses of a group's
        replicas. `MEAN` and `SUM` of `tf.compat.v1.losses.Reduction` also work.
      group_assignment: A `GroupAssignment`, or a `[num_groups,
        replicas_per_group]` nested list of replica ids. None (default) for one
        group of all replicas. Several groups train different values of the
        variables. TensorFlow shows and saves only replica 0's values.
      loss_normalization: The normalization of the differentiated loss.
        `"global"` means that the loss was divided by the number of replicas.
        `fit`, `keras.losses` objects under a strategy and
        `tf.nn.compute_average_loss` do so. `"replica"` means that it was not
        divided, so each replica's loss is its own mean. None (default) means
        `"global"`, or the setting of another wrapper in the stack.
      skip_nonfinite: Whether all replicas of all groups skip a step in which a
        gradient of any replica is nan or infinite, before or after the
        reduction. A skipped step does not change variables, slots,
        `iterations`, moving averages or residuals. It adds 1 to
        `skipped_steps`, and makes a TowerOptimizer discard its round. Each
        replica with such a gradient prints the first variable that has one,
        except in programs that XLA compiles, such as all programs on TPUs. The
        check sums two numbers over all replicas, unless the gradients' own sum
        shows every nan. None (default) means False, or the setting of another
        wrapper in the stack.
      max_consecutive_skips: The number of steps that may be skipped in a row,
        an int >= 1. The next step that would be skipped raises
        tf.errors.InvalidArgumentError. Raises ValueError under TPUStrategy.
        None (default) for no limit.
      pre_reduce: A callable that gets each replica's list of (gradient,
        variable) pairs before the reduction, and returns a list of pairs for
        the same variables. The gradients are unscaled. The division by the
        number of replicas is undone, and the loss scale of an inner
        `LossScaleOptimizer` is divided out. 16-bit gradients arrive as float32.
        None (default) does nothing. See `tf_xshard.clip_by_global_norm`.
      post_reduce: A callable like `pre_reduce`, for the reduced gradients.
      communication: A `Communication`. None (default) for its defaults.
      shard_update: Whether the g replicas of a group share the update, instead
        of repeating it. Each replica then updates 1/g of the variables and
        holds 1/g of the slot variables. A reduce-scatter of the gradients and
        an all-gather of the variables replace the all-reduce. Results are the
        same up to rounding. Muon, Lamb and Adafactor are divided by whole
        variables, and other Keras optimizers by elements. Declare your own
        classes with `tf_xshard.elementwise` or `tf_xshard.per_variable`. All
        workers must save together, since each worker holds a part. Default:
        False.
      local: The variables whose gradients are not reduced. Pass a variable, a
        layer, a regular expression to search for in variables' paths, or a list
        of these. Each replica trains its own copy of such a variable with its
        own gradients. Hooks do not get these gradients. Default: None.
      scale_local_gradients: Whether a local variable gets the gradient of the
        group's loss. With `"mean"`, this gradient is the gradient of the
        replica's own loss divided by the group's size. If False, the gradient
        of the replica's own loss is not divided. Default: True.
      name: The optimizer's name.

    Raises:
      TypeError: If an argument has the wrong type, or `inner_optimizer` is not
        a Keras optimizer.
      ValueError: If an argument is invalid or belongs on the inner optimizer,
        or if the inner optimizer does not support `shard_update`. If `local`
        matches no variable, or is combined with `global_clipnorm` or with
        another optimizer that reduces. If
        `group_assignment` is for a different number of replicas than the
        strategy has, or if the strategy is not supported.

    Example:

    >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Input((3,)),
    ...                               keras.layers.Dense(1)])
    ...     model.compile(loss="mse", optimizer=tf_xshard.CrossShardOptimizer(
    ...         keras.optimizers.Adam(0.01)))
    >>> history = model.fit(np.ones([8, 3]), np.ones([8, 1]), verbose=0)

    Limits: An Embedding's gradient has several values for a row that occurs
    several times in a batch. tf_xshard sums these values first, but Keras's
    Adam and other optimizers do not. Results therefore match the dense
    gradient, not plain Keras. `"mean"` is the mean over the global batch if the
    loss is a `tf_xshard.GlobalMean`, or if the replicas' shards have equal
    size. As in plain Keras, `keras.layers.BatchNormalization` keeps statistics
    of each replica's own shard, and Dropout masks are the same on all replicas.

    Source: `tf.compat.v1.tpu.CrossShardOptimizer`.
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        reduction: str = "mean",
        group_assignment: (
            group_assignment_lib.GroupAssignment | Sequence | np.ndarray | None
        ) = None,
        *,
        loss_normalization: str | None = None,
        skip_nonfinite: bool | None = None,
        max_consecutive_skips: int | None = None,
        pre_reduce: hooks.GradientFunction | None = None,
        post_reduce: hooks.GradientFunction | None = None,
        communication: communication_lib.Communication | None = None,
        shard_update: bool = False,
        local: Any = None,
        scale_local_gradients: bool = True,
        name: str = "CrossShardOptimizer",
        **kwargs: Any,
    ) -> None:
        checks.boolean("shard_update", shard_update)
        checks.boolean("scale_local_gradients", scale_local_gradients)
        local_variables = local_lib.LocalVariables(local)
        if shard_update and isinstance(
            inner_optimizer, keras.optimizers.Optimizer
        ):
            kinds.check(inner_optimizer)
        # Keras would track the layers as parts of this optimizer.
        self._set_untracked("_unreduced", local_variables)
        self._set_untracked("has_local_variables", bool(local_variables))
        pre_hook = hooks.Hook("pre_reduce", pre_reduce)
        post_hook = hooks.Hook("post_reduce", post_reduce)
        super().__init__(
            inner_optimizer,
            reduction=reduction,
            reducer=arguments.checked_reducer(communication),
            group_assignment=arguments.checked_groups(group_assignment),
            loss_normalization=loss_normalization,
            skip_nonfinite=skip_nonfinite,
            max_consecutive_skips=max_consecutive_skips,
            name=name,
            **kwargs,
        )
        # Checkpoints follow these attributes to variables that a hook holds.
        self._pre_reduce, self._post_reduce = pre_reduce, post_reduce
        self._set_untracked("_pre_hook", pre_hook)
        self._set_untracked("_post_hook", post_hook)
        self._set_untracked("_sharded", None)
        self._scale_local_gradients = bool(scale_local_gradients)
        self._shard_update = bool(shard_update)

    @property
    def shard_update(self) -> bool:
        """True if each replica of a group updates a part of the variables."""
        return self._shard_update

    def balance_of_update(self) -> ownership.Balance | None:
        """Returns how evenly owners divide a sharded update, if any do."""
        return self._sharded.balance() if self._sharded else None

    def _create_state(self, variables: list, plan: stack.StackPlan) -> None:
        self._unreduced.find(variables)
        self._refuse_joint_norm()
        groups = self.group_assignment
        num_replicas = self._strategy.num_replicas_in_sync
        if groups is None:
            groups = group_assignment_lib.GroupAssignment.single(num_replicas)
        # Do not refuse groups that don't fit. A saved model can be loaded
        # outside its strategy's scope, with whole slots, as files have them.
        if (
            not self._shard_update
            or groups.num_replicas != num_replicas
            or groups.group_size == 1
        ):
            super()._create_state(variables, plan)
            return
        inner = self.inner_optimizer
        if inner.built:
            raise ValueError(
                f"{self.name} has shard_update=True, but its inner optimizer"
                f" {inner.name!r} has been built with whole variables. Pass an"
                " inner optimizer that has not been built. To keep the state,"
                f" build {self.name} and call set_weights, or load the state"
                " from a file."
            )
        with self._named():
            update = sharded.ShardedUpdate(
                inner,
                variables,
                self._reducer,
                groups,
                self._strategy,
                self._unreduced.role_of,
            )
            update.build()
            self._create_residuals(variables)
        self._set_untracked("_sharded", update)

    def _step(
        self, batch: gradients_lib.GradientBatch, run: run_lib.Run
    ) -> None:
        reduced, loss_scale, carry = self._reduced(batch, run)
        scales_loss = stack.has_loss_scale_optimizer(run.plan.leaf)
        finite = None
        if scales_loss or self._checks_finite(run):
            finite = self._finite(batch, reduced, run)
        applied = reduced
        if scales_loss:
            # The LossScaleOptimizer skips the step, and lowers its scale.
            applied = reduced.with_values(
                loss_scaling.nan_unless(finite, reduced.values)
            )
        update = None
        if self._sharded:
            update = functools.partial(
                self._sharded.apply, applied, run.site, finite
            )
        self._then(
            run,
            applied,
            finite,
            # The residuals are kept after the update, which changes the scale.
            error_feedback.unscaled(carry, loss_scale),
            is_conditional=not scales_loss,
            update=update,
        )

    def _reduced(
        self, batch: gradients_lib.GradientBatch, run: run_lib.Run
    ) -> tuple[gradients_lib.GradientBatch, Any, reducer_lib.Carry]:
        """Reduces gradients according to their variables' roles.

        Also returns the loss scale and the rounding errors, for error feedback.
        """
        site, groups = run.site, run.groups(self)
        scale_loss = run.plan.leaf.scale_loss
        roles = [self._unreduced.role_of(v) for v in batch.variables]
        statistics = batch.where([not one.has_loss_gradient for one in roles])
        batch = batch.scaled(run.plan.undo(self, site))
        local = batch.where([not one.is_reduced for one in roles])
        batch = batch.where(
            [one.has_loss_gradient and one.is_reduced for one in roles]
        )
        batch = self._pre_hook(batch, scale_loss)
        loss_scale, carry = 1, None
        if self._error_feedback is not None:
            # Keep residuals without the loss scale, which changes.
            loss_scale = scale_loss(1.0)
            carry = self._error_feedback.read(loss_scale)
        is_scattered = self._sharded and self._post_hook.function is None
        reduce = self._reducer.all_reduce
        if is_scattered:
            reduce = functools.partial(
                self._reducer.reduce_scatter, owner_of=self._sharded.owner_of
            )
        batch, carry = reduce(batch, site, groups, self._reduction, carry)
        batch = self._post_hook(batch, scale_loss)
        if self._sharded and not is_scattered:
            batch = self._sharded.own_shards(batch, site)
        with recorder.labelled("statistics"):
            statistics, _ = self._reducer.all_reduce(
                statistics, site, groups, reductions.MEAN, exact=True
            )
        divisor = 1
        if local.variables:
            self._refuse_joint_norm()
            if self._scale_local_gradients:
                divisor = self._reduction.of_sum(groups.group_size)
        batch = batch.joined(statistics).joined(local.multiplied(divisor))
        return batch, loss_scale, carry

    def _finite(
        self,
        arrived: gradients_lib.GradientBatch,
        reduced: gradients_lib.GradientBatch,
        run: run_lib.Run,
    ) -> tf.Tensor:
        """Returns whether all replicas take the step; reports why not."""
        arrived_finite = loss_scaling.all_finite(arrived.values)
        finite = loss_scaling.all_finite(reduced.values)
        reports_sum, consequence = True, "All replicas skip the step."
        if self._sum_shows_all(reduced, run):
            # A replica doesn't know whether another one got a bad gradient.
            reports_sum = not run.site.replica_id
            consequence += " Unless a replica reports a gradient, the sum is"
            consequence += " the cause."
        else:
            num_arrived, num_reduced = loss_scaling.votes(
                [tf.logical_not(arrived_finite), tf.logical_not(finite)],
                run.site,
                self._reducer.channel(run.groups(self)),
            )
            arrived_finite = tf.equal(num_arrived, 0)
            finite = tf.equal(num_arrived + num_reduced, 0)
        if self._checks_finite(run):
            step = self._num_skipped_here() + tf.cast(
                self.inner_optimizer.iterations, tf.int64
            )
            skipping.report(arrived, step, run.site)
            skipping.report(
                reduced,
                step,
                run.site,
                what="reduced gradient",
                consequence=consequence,
                when=tf.logical_and(arrived_finite, reports_sum),
            )
        return finite

    def _sum_shows_all(
        self, reduced: gradients_lib.GradientBatch, run: run_lib.Run
    ) -> bool:
        """Returns whether a nan of any replica is in this replica's sum.

        Then replicas need no vote.
        """
        return (
            run.groups(self).group_size == run.site.num_replicas
            and not self._sharded
            and not self._unreduced
            and self._pre_hook.function is None
            and self._post_hook.function is None
            and self.communication.dtype is None
            and all(
                variable_role.role_of(variable).has_loss_gradient
                and not isinstance(value, tf.IndexedSlices)
                for value, variable in reduced.pairs()
            )
        )

    def _refuse_joint_norm(self) -> None:
        if self._unreduced and any(
            one.global_clipnorm for one in stack.descendants(self)
        ):
            raise ValueError(
                f"{self.name} has local variables, whose gradients differ by"
                " replica, so the norm of all gradients (global_clipnorm) would"
                " differ, and the shared variables would diverge. Use clipnorm,"
                " or post_reduce=tf_xshard.clip_by_global_norm(...), which gets"
                " the reduced gradients only."
            )

    def _has_residual(self, variable: Any) -> bool:
        return (
            super()._has_residual(variable) and variable not in self._unreduced
        )

    def _kinds_of_state(self) -> dict[int, str]:
        """See the base class; slots have their variable's path in the name."""
        local, key = self._unreduced, replica_variables.key
        starts = {
            f"{replica_variables.flat_name(one)}_": one
            for one in optimizer_state.trainable_variables(self)
        }
        slots = []
        for slot in self.inner_optimizer.variables if local else ():
            # "w_scale_momentum" is a slot of "w_scale", not of "w", and so is
            # Adafactor's "w_scale".
            name = slot.path.split("/")[-1] + "_"
            found = [start for start in starts if name.startswith(start)]
            if found:
                slots.append((starts[max(found, key=len)], slot))
        # Adafactor's means do not have their variable's path in the name.
        for optimizer in stack.descendants(self.inner_optimizer):
            slots += keras_shards.slots_by_variable(optimizer)
        own = [slot for variable, slot in slots if variable in local]
        return {key(one): "local" for one in (*local, *own)}

    def _unsaved_state(self) -> str | None:
        if self._unreduced and self._strategy.num_replicas_in_sync > 1:
            return "trains local variables, which differ by replica."
        groups = self.group_assignment
        if groups is not None and groups.num_groups > 1:
            return f"trains {groups.num_groups} groups, whose variables differ."
        if self._error_feedback and self._strategy.num_replicas_in_sync > 1:
            return "keeps each replica's rounding errors (error_feedback=True)."
        return None

    def get_config(self) -> dict:
        """Returns the arguments, for serialization.

        Returns:
          A dict for `from_config`.

        Example:

        >>> optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(),
        ...                                           "sum", [[0]])
        >>> config = optimizer.get_config()
        >>> config["reduction"], config["group_assignment"]
        ('sum', [[0]])
        """
        return {
            **super().get_config(),
            **self._reducer_config(),
            "pre_reduce": _serialized(self._pre_reduce),
            "post_reduce": _serialized(self._post_reduce),
            "shard_update": self.shard_update,
            "local": self._unreduced.get_config() or None,
            "scale_local_gradients": self._scale_local_gradients,
        }


def implicit(optimizer: keras.optimizers.Optimizer) -> CrossShardOptimizer:
    """Wraps an optimizer, to reduce if no other wrapper of the stack does."""
    result = CrossShardOptimizer(optimizer)
    result._set_untracked("is_implicit", True)
    return result


def _serialized(function: hooks.GradientFunction | None) -> dict | None:
    if function is None:
        return None
    return keras.saving.serialize_keras_object(function)
