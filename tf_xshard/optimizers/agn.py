"""Defines `AGNOptimizer`, with local steps and periodic exchanges."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import checks
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.collectives import recorder
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.distribute import variable_role
from tf_xshard.optimizers import accumulator
from tf_xshard.optimizers import arguments
from tf_xshard.optimizers import base
from tf_xshard.optimizers import commit
from tf_xshard.optimizers import run as run_lib
from tf_xshard.optimizers import skipping
from tf_xshard.optimizers import stack
from tf_xshard.optimizers.update import whole
from tf_xshard.private.keras import moving_averages
from tf_xshard.private.keras import optimizer_state
from tf_xshard.private.keras import wrapper_internals
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import loss_scaling


class Center:
    """The center variables, one for each local variable in the model."""

    # Methods that end in `_here` run in replica context and change this
    # replica's values. Other methods run outside it and change all values.

    def __init__(
        self,
        local: Sequence[keras.Variable],
        variables: Sequence[keras.Variable],
        shown: keras.Variable,
        strategy: tf.distribute.Strategy,
    ) -> None:
        self.variables = list(variables)
        self._local = list(local)
        self._shown_variable = shown
        self._of_strategy = strategy

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Iterates over (local variable, center) pairs."""
        return iter(list(zip(self._local, self.variables, strict=True)))

    @property
    def is_shown(self) -> bool:
        """True while the model's variables hold the center."""
        [shown, *_] = self._of_strategy.experimental_local_results(
            self._shown_variable.value
        )
        return bool(shown)

    def show(self, shown: bool) -> None:
        """Puts the center or the local variables into the model, by a swap."""
        if shown == self.is_shown:
            return
        with self._of_strategy.scope():
            for variable, center in self:
                replica_variables.swap(variable, center, self._of_strategy)
            self._shown_variable.assign(int(shown))

    def copy_into_model(self) -> None:
        """Copies the center's values to the local variables."""
        with self._of_strategy.scope():
            for variable, center in self:
                replica_variables.copy(center, variable, self._of_strategy)

    def hide_here(self) -> None:
        """Restores the local variables if the model holds the center."""
        shown = replica_variables.read(self._shown_variable) > 0
        replica_variables.cond(shown, self._swap_here)

    def _swap_here(self) -> None:
        for variable, center in self:
            replica_variables.swap_here(variable, center)
        replica_variables.assign(self._shown_variable, 0)

    def start_period_here(self) -> None:
        """Sets the center to the model's values."""
        # The values are equal unless the model's values have been set since the
        # last exchange (`set_weights`, `EarlyStopping`). New values then win.
        for variable, center in self:
            replica_variables.assign(center, replica_variables.read(variable))

    def adopt_here(self) -> None:
        """Sets the local variables to the center."""
        for variable, center in self:
            replica_variables.assign(variable, replica_variables.read(center))

    def change_here(self, index: int) -> tf.Tensor:
        """Returns the change that the local steps made, center - local."""
        read = replica_variables.read
        return read(self.variables[index]) - read(self._local[index])


_ACCUMULATIONS = ("gradients", "updates")


@keras.saving.register_keras_serializable("tf_xshard")
class AGNOptimizer(base.GradientWrapper):
    """Trains each replica locally, and communicates every few steps.

    Each replica trains its own copy of the variables. At an exchange, every
    `communication_period` steps, the group combines its replicas' accumulated
    gradients, divided by the number of steps. The inner optimizer applies the
    result to a center, from which all replicas of the group continue.

    ```
    each call             local    <-  local_optimizer(gradient)
                          sum      <-  sum + gradient
    each communication_   center   <-  inner_optimizer(mean over the group of
    period calls                                       sum / period)
                          local    <-  center;   sum <- 0
    ```

    With `accumulate="updates", normalize=False` and an inner `SGD(1.0)`, this
    is local SGD (model averaging). With an inner optimizer that has Nesterov
    momentum, it is DiLoCo.

    Between exchanges, the replicas' variables differ, and TensorFlow shows and
    saves replica 0's variables. At the end of `fit`, the model gets the center,
    after an early exchange if steps are pending.

    Args:
      inner_optimizer: The `keras.optimizers.Optimizer` of the center.
      num_worker: The number of replicas, checked if given. Default: None.
      communication_period: Steps from one exchange to the next, an int >= 1.
        Default: 10.
      local_optimizer: The optimizer of the replicas' own variables. Its slot
        variables are never reset. Default: a copy of the inner optimizer. For
        a legacy `.h5` file, the two optimizers need different names.
      accumulate: `"gradients"` (default), or `"updates"` for the change that
        the local steps made, center - local.
      normalize: Whether to divide the accumulation by the number of local
        steps, as in the paper. Default: True.
      reduction: `"mean"` (default) or `"sum"` over the replicas of a group.
      group_assignment: See `CrossShardOptimizer`. Inside another wrapper, None
        (default) takes the wrapper's groups.
      loss_normalization: See `CrossShardOptimizer`.
      skip_nonfinite: Whether to skip local steps and exchanges with nan or
        infinite values. A replica skips a local step if one of its own
        gradients is nan or infinite. All replicas skip an exchange, and go back
        to the center, if any gradient is nan or infinite before or after the
        sum over replicas. For None (default), see `CrossShardOptimizer`.
      max_consecutive_skips: The number of exchanges that may be skipped in a
        row. See `CrossShardOptimizer`.
      communication: A `Communication`. None (default) for its defaults.
      name: The optimizer's name.

    Raises:
      TypeError: If an argument has the wrong type.
      ValueError: If an argument is invalid, if a LossScaleOptimizer or a
        tf_xshard optimizer is inside, or if the strategy is not supported.

    Example:

    >>> optimizer = tf_xshard.AGNOptimizer(keras.optimizers.SGD(1.0),
    ...                                    communication_period=2)
    >>> weight = keras.Variable(10.0)
    >>> for gradient in (1.0, 3.0):
    ...     optimizer.apply([tf.constant(gradient)], [weight])
    ...     float(weight)
    9.0
    8.0

    Source: Joeri Hermans et al., Accumulated Gradient Normalization, arXiv
    1710.02368; `tf.contrib.opt.AGNOptimizer` (TensorFlow 1.14).
    """

    follows_groups_around = True
    _supports_loss_scaling = False
    _local_skips: keras.Variable | None = None

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        num_worker: int | None = None,
        communication_period: int = 10,
        *,
        local_optimizer: keras.optimizers.Optimizer | None = None,
        accumulate: str = "gradients",
        normalize: bool = True,
        reduction: str = "mean",
        group_assignment: (
            group_assignment_lib.GroupAssignment | Sequence | np.ndarray | None
        ) = None,
        loss_normalization: str | None = None,
        skip_nonfinite: bool | None = None,
        max_consecutive_skips: int | None = None,
        communication: communication_lib.Communication | None = None,
        name: str = "AGNOptimizer",
        **kwargs: Any,
    ) -> None:
        _check_arguments(
            num_worker, communication_period, accumulate, normalize
        )
        _check_optimizers(inner_optimizer, local_optimizer)
        if local_optimizer is None and isinstance(
            inner_optimizer, keras.optimizers.Optimizer
        ):
            local_optimizer = _copied(inner_optimizer)
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
        assert local_optimizer is not None
        whole.make_local(local_optimizer)
        self.local_optimizer = local_optimizer
        self._period = int(communication_period)
        self._accumulate = accumulate
        self._normalize = normalize
        self._set_untracked("_seen", accumulator.SeenVariables(name))
        # The key and the function of the early exchange that was traced last.
        self._set_untracked("_exchange_of_fits", None)

    # Attributes for users.

    @property
    def communication_period(self) -> int:
        """The number of steps from one exchange to the next."""
        return self._period

    @property
    def center_variables(self) -> list[keras.Variable]:
        """The center variables, in the order of the trainable variables.

        While the model holds the center, these variables hold the local values.
        """
        return list(self._center) if self.built else []

    @property
    def center_is_shown(self) -> bool:
        """True while the model's variables hold the center."""
        if not self.built:
            return False
        return self._center_pairs.is_shown

    @property
    def exchanges(self) -> keras.Variable | tf.Tensor:
        """The number of exchanges so far, a variable after `build`."""
        return self._exchanges if self.built else tf.constant(0, tf.int64)

    @property
    def skipped_local_steps(self) -> int:
        """The number of local steps that replicas skipped, over all replicas.

        Read it outside `strategy.run`. With several processes, read it in all
        of them.
        """
        if self._local_skips is None:
            return 0
        mean = self._local_skips.numpy()
        return round(float(mean) * self._strategy.num_replicas_in_sync)

    @property
    def iterations(self) -> Any:
        """The number of local steps."""
        return self.local_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The local optimizer's learning rate; settable.

        The center's learning rate is `inner_optimizer.learning_rate`.
        """
        return self.local_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.local_optimizer.learning_rate = value

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """A local MultiOptimizer's optimizers; AttributeError for others."""
        return self.local_optimizer.optimizers

    @property
    def variables(self) -> list[keras.Variable]:
        """The center, the counters, and both optimizers' variables."""
        return super().variables + self.local_optimizer.variables

    def exclude_from_weight_decay(
        self,
        var_list: Sequence | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Excludes variables from both optimizers' weight decay.

        Call it before the first step. It does not change traced functions.

        Args:
          var_list: Variables to exclude, or None.
          var_names: Strings, or None. Excludes variables whose name contains
            any of the strings.
        """
        for one in (self.inner_optimizer, self.local_optimizer):
            one.exclude_from_weight_decay(var_list, var_names)
        if self.built:
            self._exclude_center()

    def _exclude_center(self) -> None:
        """Excludes the centers of the inner optimizer's excluded variables."""
        center_of = {id(local): center for local, center in self._center_pairs}
        for one in stack.descendants(self.inner_optimizer):
            excluded = optimizer_state.excluded_from_weight_decay(
                one, [local for local, _ in self._center_pairs]
            )
            if excluded:
                one.exclude_from_weight_decay(
                    [center_of[id(local)] for local in excluded]
                )

    def show_center(self, shown: bool) -> None:
        """Puts the center or the local variables into the model.

        Call it outside `strategy.run`. In `fit`, `SwapCenterWeights` calls it.
        A step restores the local variables automatically, but only after its
        gradients have been computed.

        Args:
          shown: Whether the model's variables should hold the center.

        Raises:
          RuntimeError: In replica context of a strategy.

        Example:

        >>> optimizer = tf_xshard.AGNOptimizer(keras.optimizers.SGD(1.0))
        >>> weight = keras.Variable(10.0)
        >>> optimizer.apply([tf.constant(1.0)], [weight])
        >>> optimizer.show_center(True)
        >>> float(weight)
        10.0
        >>> optimizer.show_center(False)
        >>> float(weight)
        9.0
        """
        site_lib.refuse_replica_context(f"{self.name}.show_center()")
        if self.built:
            self._center_pairs.show(shown)

    # The training step.

    def _counts(self) -> list[commit.Count]:
        return [
            commit.Count("pending", self._pending, is_common=True),
            commit.Count("exchanges", self._exchanges),
        ]

    def forgetting_traces(self) -> contextlib.AbstractContextManager:
        """See the base class."""
        return self._seen.unchanged()

    def _create_state(self, variables: list, plan: stack.StackPlan) -> None:
        del plan  # No wrapper is inside.
        for variable in variables:
            if not variable_role.role_of(variable).has_loss_gradient:
                raise ValueError(
                    f"{variable.path} is overwritten by its gradient (float8"
                    " training), which can't be accumulated. AGNOptimizer does"
                    " not support it; use CrossShardOptimizer or another dtype"
                    " policy."
                )
        # Create the center outside the scope with this optimizer's name, which
        # would become part of the variables' paths.
        self._center = [replica_variables.copy_of(v) for v in variables]
        with self._named():
            sums = accumulator.GradientAccumulator(
                variables,
                "sum",
                self._seen,
                has_sums=self._accumulate == "gradients",
            )
            self._set_untracked("_accumulator", sums)
            # Checkpoints store the variables under this name.
            self._accumulators = sums.sums
            self._pending = replica_variables.make(
                (), "int64", "pending", wrapper_internals.Counter
            )
            self._exchanges = replica_variables.make((), "int64", "exchanges")
            # Save the flag, since a file can be written while the center is
            # shown.
            self._shown = replica_variables.make(
                (), "int64", "center_is_shown", wrapper_internals.Counter
            )
            pairs = Center(variables, self._center, self._shown, self._strategy)
            self._set_untracked("_center_pairs", pairs)
            self._exclude_center()
            self.inner_optimizer.build(self._center)
            with keras.name_scope("local"):
                self.local_optimizer.build(variables)
            self._create_residuals(variables)
        # Check optimizers that a MultiOptimizer has just created.
        for optimizer in (self.inner_optimizer, self.local_optimizer):
            _refuse_inside(optimizer)
        whole.make_local(self.local_optimizer)
        for one in stack.descendants(self.inner_optimizer):
            moving_averages.refuse_swapped_averages(
                one,
                "SwapEMAWeights can't be used with AGNOptimizer, which averages"
                " the center instead of the model's variables. To evaluate the"
                " center, use tf_xshard.SwapCenterWeights. At the end of fit,"
                " the model gets the averages.",
            )

    def _step(
        self, batch: gradients_lib.GradientBatch, run: run_lib.Run
    ) -> None:
        batch = batch.scaled(run.plan.undo(self, run.site)).multiplied()
        # An exchange sends what this call's local step writes, so the writes
        # wait for the gradients only.
        with run.behind_gate() as behind:
            self._write_step(batch, behind)

    def _write_step(
        self, batch: gradients_lib.GradientBatch, run: run_lib.Run
    ) -> None:
        """Takes a local step, and exchanges at the end of a period."""
        pending = replica_variables.read(self._pending)
        self._center_pairs.hide_here()
        replica_variables.cond(
            tf.equal(pending, 0), self._center_pairs.start_period_here
        )
        weight = self._reduction.weight(run.groups(self).group_size)
        indices = optimizer_state.indices_of(self, batch.variables)

        def local_step() -> None:
            whole.apply(self.local_optimizer, batch)
            sums = batch.scaled(weight).multiplied().values
            self._accumulator.add(sums, indices)

        if run.plan.skip_nonfinite:
            self._step_if_finite(batch, local_step, run.site)
        else:
            local_step()
        replica_variables.assign(self._pending, pending + 1)

        def exchange() -> None:
            self._seen.note_update()
            self._note_restored(self._note_restored_changes)
            with recorder.labelled("exchange", every=self._period):
                self._exchange(pending + 1, indices, run)

        # A file with a longer period may have set `pending` above the period.
        replica_variables.cond(pending + 1 >= self._period, exchange)

    def _step_if_finite(
        self,
        batch: gradients_lib.GradientBatch,
        local_step: Callable[[], None],
        site: site_lib.Site,
    ) -> None:
        """Takes a local step if this replica's gradients are finite."""
        self._skip_counter()
        skips = tf.cast(replica_variables.read(self._local_skips), tf.int64)
        skipping.report(
            batch,
            tf.cast(self.iterations, tf.int64) + skips,
            site,
            consequence="This replica skips its local step.",
        )
        finite = loss_scaling.all_finite(batch.values)
        replica_variables.cond(finite, local_step)
        taken = tf.cast(finite, tf.float32)
        replica_variables.add(self._steps_taken, taken)
        replica_variables.add(self._local_skips, 1 - taken)

    def _skip_counter(self) -> skipping.SkipCounter:
        """See the base class; also counts local steps, by replica."""
        if self._local_skips is None:
            with self._creating_variables(), self._named():
                self._local_skips = replica_variables.make(
                    (), "float32", "skipped_local_steps"
                )
                # This replica's local steps since the last exchange.
                self._steps_taken = replica_variables.make(
                    (), "float32", "steps_taken"
                )
        return super()._skip_counter()

    def _exchange(
        self,
        num_steps: int | tf.Tensor,
        indices: Sequence[int],
        run: run_lib.Run,
    ) -> None:
        """Applies the accumulation of `num_steps` local steps to the center."""
        site, groups = run.site, run.groups(self)
        local = optimizer_state.trainable_variables(self)
        weight = self._reduction.weight(groups.group_size)
        # Skip variables that are frozen and not among the call's variables.
        of_call = set(indices)
        totals = [
            self._accumulated(index, num_steps, weight)
            if index in of_call or getattr(variable, "trainable", True)
            else None
            for index, variable in enumerate(local)
        ]
        own_totals, feedback = totals, self._error_feedback
        totals, carry = self._reducer.all_reduce(
            gradients_lib.GradientBatch(totals, local),
            site,
            groups,
            self._reduction,
            feedback and feedback.read(1),
        )
        finite = None
        if self._checks_finite(run):
            finite = self._checked_finite(own_totals, totals, run)
        # A variable without a gradient does not even get weight decay.
        present = [value is not None for value in totals.values]
        of_center = gradients_lib.GradientBatch(totals.values, self._center)
        # A MultiOptimizer needs all of its variables, with None.
        if not any(
            map(
                stack.is_multi_optimizer,
                stack.descendants(self.inner_optimizer),
            )
        ):
            of_center = of_center.where(present)

        def start_period() -> None:
            if finite is not None:
                replica_variables.assign(self._steps_taken, 0)
            self._center_pairs.adopt_here()
            self._accumulator.reset()
            replica_variables.assign(self._pending, 0)
            replica_variables.add(self._exchanges, 1)

        self._then(
            run,
            of_center,
            finite,
            carry,
            update=None if any(present) else lambda: None,
            writes=[start_period],
        )

    def _checked_finite(
        self,
        own: Sequence,
        totals: gradients_lib.GradientBatch,
        run: run_lib.Run,
    ) -> tf.Tensor:
        """Returns whether all replicas exchange; reports why not."""
        self._skip_counter()
        finite = loss_scaling.all_finite([*own, *totals.values])
        num_bad, num_stepped = loss_scaling.votes(
            [
                tf.logical_not(finite),
                replica_variables.read(self._steps_taken) > 0,
            ],
            run.site,
            self._reducer.channel(run.groups(self)),
        )
        skipping.report(
            totals,
            replica_variables.read(self._exchanges),
            run.site,
            what="reduced accumulation",
            event="exchange",
            consequence="All replicas skip it.",
        )
        # A period in which no replica took a step has nothing to exchange.
        return tf.logical_and(tf.equal(num_bad, 0), num_stepped > 0)

    def _note_restored_changes(self) -> None:
        """Records variables that a restored period has changed already."""
        if self._accumulate == "gradients":
            self._accumulator.note_restored()
            return
        [pending, *_] = replica_variables.copies(self._pending)
        for index, (local, center) in enumerate(self._center_pairs):
            if int(pending) and not all(
                np.array_equal(one, other)
                for one, other in zip(
                    replica_variables.copies(local),
                    replica_variables.copies(center),
                    strict=True,
                )
            ):
                self._seen.add_restored(index, sparse=False)

    def _accumulated(
        self, index: int, num_steps: int | tf.Tensor, weight: int
    ) -> Any:
        """Returns this replica's part of an exchange, in the center's dtype."""
        if index not in self._seen:
            return None
        divisor: int | tf.Tensor = 1
        if self._accumulate == "gradients":
            total = self._accumulator.read(index)
            divisor = weight
        else:
            total = self._center_pairs.change_here(index)
        if self._normalize:
            divisor = divisor * num_steps
        if tf.is_tensor(divisor) or divisor != 1:
            total /= tf.cast(divisor, total.dtype)
        return tf.cast(total, self._center[index].dtype)

    def _finalize(self, var_list: Sequence, plan: stack.StackPlan) -> None:
        if not self.built:
            return
        self.show_center(False)
        strategy = self._strategy
        [pending, *_] = strategy.experimental_local_results(self._pending.value)
        pending = int(pending)

        indices = optimizer_state.indices_of(self, var_list)

        def on_replica(num_steps: int | tf.Tensor) -> None:
            run = run_lib.Run(plan, site_lib.current())
            self._exchange(num_steps, indices, run)

        if pending:
            self._note_restored_changes()
        if pending and strategy.num_replicas_in_sync == 1:
            on_replica(pending)
        elif pending:
            self._early_exchange(on_replica, plan, indices)(
                tf.constant(pending, tf.int64)
            )
        self.inner_optimizer.finalize_variable_values(self._center)
        if any(one.use_ema for one in stack.descendants(self.inner_optimizer)):
            self._center_pairs.copy_into_model()

    def _early_exchange(
        self,
        on_replica: Callable[[tf.Tensor], None],
        plan: stack.StackPlan,
        indices: Sequence[int],
    ) -> Callable[[tf.Tensor], Any]:
        """Returns the traced exchange of all replicas, new or as kept."""
        key = (
            plan.chain,
            indices,
            self._seen.state(),
            [getattr(one, "trainable", True) for one, _ in self._center_pairs],
            [
                (
                    optimizer_state.settings(one),
                    optimizer_state.excluded_from_weight_decay(
                        one, self._center
                    ),
                )
                for one in stack.descendants(self.inner_optimizer)
            ],
        )
        if self._exchange_of_fits is None or self._exchange_of_fits[0] != key:
            with self._strategy.scope():
                exchange = tf.function(
                    lambda num_steps: self._strategy.run(
                        on_replica, args=(num_steps,)
                    ),
                    autograph=False,
                    input_signature=[tf.TensorSpec([], tf.int64)],
                ).get_concrete_function()
            self._set_untracked("_exchange_of_fits", (key, exchange))
        return self._exchange_of_fits[1]

    def reset(self) -> None:
        """Starts a new period from the center, on all replicas.

        Discards the local steps since the last exchange, and puts the center
        into the model. Call it outside `strategy.run`. If you assign other
        values to the model's variables within a period, the next exchange
        overwrites them. Call `reset()` before you assign them, and the new
        period starts from them.

        Raises:
          RuntimeError: In replica context of a strategy.

        Example:

        >>> optimizer = tf_xshard.AGNOptimizer(keras.optimizers.SGD(1.0),
        ...                                    communication_period=2)
        >>> weight = keras.Variable(10.0)
        >>> optimizer.apply([tf.constant(100.0)], [weight])
        >>> optimizer.reset()
        >>> for gradient in (1.0, 3.0):
        ...     optimizer.apply([tf.constant(gradient)], [weight])
        >>> float(weight)
        8.0
        """
        site_lib.refuse_replica_context(f"{self.name}.reset()")
        if not self.built:
            return
        self._center_pairs.show(False)
        self._center_pairs.copy_into_model()
        of_period = [self._pending, *self._accumulators]
        if self._local_skips is not None:
            of_period.append(self._steps_taken)
        for variable in of_period:
            variable.assign(tf.zeros(variable.shape, variable.dtype))

    # Saving, and methods that GroupState calls.

    def _unsaved_state(self) -> str | None:
        if self._strategy.num_replicas_in_sync == 1:
            return None
        return "trains each replica's own variables and slots."

    def _kinds_of_state(self) -> dict[int, str]:
        local, center = map(list, zip(*self._center_pairs, strict=True))
        if self.center_is_shown:
            local, center = center, local
        of_local_steps = [
            variable
            for one in stack.descendants(self.local_optimizer)
            for variable in one.variables
        ]
        return {
            replica_variables.key(variable): kind
            for kind, variables in (
                ("local", [*local, *of_local_steps]),
                ("center", center),
            )
            for variable in variables
        }

    def _centers_by_variable(self) -> dict[int, Any]:
        if self.center_is_shown:
            return {}
        return {id(variable): center for variable, center in self._center_pairs}

    def get_config(self) -> dict:
        """Returns the arguments, for serialization.

        Returns:
          A dict for `from_config`.

        Example:

        >>> tf_xshard.AGNOptimizer(keras.optimizers.SGD()).get_config()[
        ...     "communication_period"]
        10
        """
        return {
            **super().get_config(),
            **self._reducer_config(),
            "communication_period": self._period,
            "local_optimizer": keras.saving.serialize_keras_object(
                self.local_optimizer
            ),
            "accumulate": self._accumulate,
            "normalize": self._normalize,
        }


def _check_arguments(
    num_worker: Any, communication_period: Any, accumulate: Any, normalize: Any
) -> None:
    """Checks AGNOptimizer's arguments of these names."""
    checks.positive_integer("communication_period", communication_period)
    if num_worker is not None:
        checks.positive_integer("num_worker", num_worker)
        found = tf.distribute.get_strategy().num_replicas_in_sync
        if num_worker != found:
            raise ValueError(
                f"num_worker is {num_worker}, but the strategy has {found}"
                " replicas. Leave num_worker out, or create the optimizer in"
                " the scope of the strategy that trains."
            )
    if accumulate not in _ACCUMULATIONS:
        raise ValueError(
            f"accumulate must be one of {_ACCUMULATIONS}, got {accumulate!r}."
        )
    checks.boolean("normalize", normalize)


def _check_optimizers(inner_optimizer: Any, local_optimizer: Any) -> None:
    """Checks the two optimizers; the second may be None."""
    if not isinstance(
        local_optimizer, (keras.optimizers.Optimizer, type(None))
    ):
        raise TypeError(
            "local_optimizer must be a keras.optimizers.Optimizer, got"
            f" {local_optimizer!r}."
        )
    for one in (inner_optimizer, local_optimizer):
        _refuse_inside(one)
    if getattr(inner_optimizer, "built", False):
        raise ValueError(
            f"The inner optimizer {inner_optimizer.name!r} has been built for"
            " variables that are not the center. Pass a new optimizer."
        )
    if local_optimizer is None:
        return
    if local_optimizer is inner_optimizer:
        raise ValueError(
            "local_optimizer is the inner optimizer itself. Pass another"
            " object, or None (the default) to make a copy."
        )
    if local_optimizer.built:
        raise ValueError(
            f"The local optimizer {local_optimizer.name!r} has been built, so"
            " its slots may belong to other variables. Pass a new optimizer."
        )
    arguments.check_same_scope(
        "AGNOptimizer",
        tf.distribute.get_strategy(),
        local_optimizer,
        "local",
    )
    whole.refuse_own_reductions(local_optimizer)


def _copied(
    inner_optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.Optimizer:
    """Creates a local optimizer as a copy of the inner optimizer."""
    try:
        config = inner_optimizer.get_config()
        # Legacy .h5 files key variables by path, which contains this name.
        config["name"] = f"{inner_optimizer.name}_local"
        result = type(inner_optimizer).from_config(config)
        # Before it is built, a MultiOptimizer may differ from its copy.
        for one, copy in zip(
            stack.descendants(inner_optimizer),
            stack.descendants(result),
            strict=False,
        ):
            optimizer_state.copy_exclusions(one, copy)
        return result
    except Exception as error:
        raise ValueError(
            f"{type(inner_optimizer).__name__} can't be copied by its config"
            f" ({error}). Pass a local_optimizer to AGNOptimizer."
        ) from error


def _refuse_inside(optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return
    for one in stack.descendants(optimizer):
        if stack.is_wrapper(one):
            raise ValueError(
                f"{type(one).__name__} is inside AGNOptimizer, which already"
                f" reduces gradients. Pass the optimizer that"
                f" {type(one).__name__} wraps instead."
            )
        if isinstance(one, keras.optimizers.LossScaleOptimizer) or (
            one.loss_scale_factor
        ):
            raise ValueError(
                "AGNOptimizer does not support loss scaling: the replicas'"
                " loss scales would diverge between exchanges. Use bfloat16"
                " (the dtype policy mixed_bfloat16), which needs no loss"
                " scaling."
            )
