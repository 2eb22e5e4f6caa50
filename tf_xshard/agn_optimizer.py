"""AGNOptimizer: local steps on each replica, an exchange now and then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard import cross_shard_optimizer
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import inner_update
from tf_xshard import reduction as reduction_lib
from tf_xshard import replica_context
from tf_xshard import replica_variables
from tf_xshard import wrapper

ACCUMULATIONS = ("gradients", "updates")


@keras.saving.register_keras_serializable("tf_xshard")
class AGNOptimizer(wrapper.OptimizerWrapper):
    """Accumulated gradient normalization: communicate every so many steps.

    Each replica is a worker that trains variables of its own. Every
    `communication_period` steps what it has accumulated, divided by the number
    of its steps, is combined over the group, and the inner optimizer applies
    that to a center; all workers of the group go on from there.

    ```
    each call             local    <-  local_optimizer(gradient)
                          sum      <-  sum + gradient
    each communication_   center   <-  inner_optimizer(mean over the group of
    period calls                                       sum / period)
                          local    <-  center;   sum <- 0
    ```

    With `accumulate="updates", normalize=False` and an inner `SGD(1.0)` this is
    local SGD (model averaging); with Nesterov momentum, DiLoCo.

    Between exchanges nothing crosses replicas, so their variables differ, and
    TensorFlow shows and saves those of replica 0. At the end of `fit` the
    center is put into the model, after an early exchange if steps are pending.

    Args:
      inner_optimizer: The `keras.optimizers.Optimizer` of the center.
      num_worker: The number of replicas, checked if it is given. Default: None.
      communication_period: Steps from one exchange to the next, at least 1.
        Default: 10.
      local_optimizer: The optimizer of the replicas' own variables, whose slots
        are never reset. Default: a copy of the inner one.
      accumulate: `"gradients"` (default), or `"updates"`: what the local steps
        have changed, center - local.
      normalize: Whether the accumulation is divided by the number of local
        steps in it, as in the paper. Default: True.
      reduction: `"mean"` (default) or `"sum"` over the replicas of a group.
      group_assignment: See `CrossShardOptimizer`.
      loss_normalization: See `CrossShardOptimizer`.
      communication: A `Communication`. None (default) for its defaults.
      name: The optimizer's name.

    Raises:
      TypeError: If an argument has a wrong type.
      ValueError: If an argument has a wrong value, a LossScaleOptimizer or a
        tf_xshard optimizer is inside, or the strategy is not supported.

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
        communication: communication_lib.Communication | None = None,
        name: str = "AGNOptimizer",
        **kwargs: Any,
    ):
        _check_count("communication_period", communication_period)
        if num_worker is not None:
            _check_count("num_worker", num_worker)
            found = tf.distribute.get_strategy().num_replicas_in_sync
            if num_worker != found:
                raise ValueError(
                    f"num_worker is {num_worker}, and the strategy has {found}"
                    " replicas. Leave it out, or make the optimizer in the"
                    " scope of the strategy that trains."
                )
        if accumulate not in ACCUMULATIONS:
            raise ValueError(
                f"accumulate must be one of {ACCUMULATIONS}, got"
                f" {accumulate!r}."
            )
        if not isinstance(normalize, bool):
            raise TypeError(f"normalize must be a bool, got {normalize!r}.")
        for one in (inner_optimizer, local_optimizer):
            _refuse_inside(one)
        reduction = cross_shard_optimizer.checked_reduction(reduction)
        group_assignment, communication = (
            cross_shard_optimizer.checked_communication(
                group_assignment, communication
            )
        )
        if local_optimizer is None and isinstance(
            inner_optimizer, keras.optimizers.Optimizer
        ):
            local_optimizer = type(inner_optimizer).from_config(
                inner_optimizer.get_config()
            )
        elif local_optimizer is inner_optimizer and inner_optimizer is not None:
            raise ValueError(
                "local_optimizer is the inner optimizer itself. Give another"
                " object; None (the default) makes a copy."
            )
        super().__init__(
            inner_optimizer,
            loss_normalization=loss_normalization,
            name=name,
            **kwargs,
        )
        if not isinstance(local_optimizer, keras.optimizers.Optimizer):
            raise TypeError(
                "local_optimizer must be a keras.optimizers.Optimizer, got"
                f" {local_optimizer!r}."
            )
        inner_update.make_local(local_optimizer)
        self.local_optimizer = local_optimizer
        self._period = communication_period
        self._accumulate = accumulate
        self._normalize = normalize
        self._reduction = reduction
        self._group_assignment = group_assignment
        self._communication = communication
        self._set_untracked("_known_patterns", {})
        self._set_untracked("_seen", set())
        self._set_untracked("_shows_center", False)

    @property
    def communication_period(self) -> int:
        """Steps from one exchange to the next."""
        return self._period

    @property
    def center_variables(self) -> list[keras.Variable]:
        """The center, in the order of the trainable variables."""
        return list(self._center) if self.built else []

    @property
    def exchanges(self) -> keras.Variable:
        """How many exchanges there were."""
        return self._exchanges

    @property
    def iterations(self):
        """The number of local steps."""
        return self.local_optimizer.iterations

    @property
    def learning_rate(self):
        """The local optimizer's learning rate; can be set.

        The center's is `inner_optimizer.learning_rate`.
        """
        return self.local_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value):
        self.local_optimizer.learning_rate = value

    @property
    def variables(self) -> list[keras.Variable]:
        """The center, what is counted, and both optimizers' variables."""
        return super().variables + self.local_optimizer.variables

    def _build_inner(self, variables) -> None:
        for variable in variables:
            if inner_update.is_overwritten(variable):
                raise ValueError(
                    f"{replica_variables.flat_name(variable)} is overwritten"
                    " by its gradient (float8 training), which has no"
                    " accumulation. AGNOptimizer does not take it; use"
                    " CrossShardOptimizer or another dtype policy."
                )
        names = [replica_variables.flat_name(v) for v in variables]
        self._center = [
            replica_variables.copy_of(variable, f"{name}_center")
            for variable, name in zip(variables, names, strict=True)
        ]
        self._accumulators = (
            [
                replica_variables.accumulator_of(variable, f"{name}_sum")
                for variable, name in zip(variables, names, strict=True)
            ]
            if self._accumulate == "gradients"
            else []
        )
        self._pending = replica_variables.make((), "int32", "pending")
        self._exchanges = replica_variables.make((), "int64", "exchanges")
        self.inner_optimizer.build(self._center)
        self.local_optimizer.build(variables)
        inner_update.make_local(self.local_optimizer)

    def _step(self, gradients, variables, here: replica_context.Here) -> None:
        gradients = [
            reduction_lib.scaled(gradient, self._arriving_divisor(here))
            for gradient in reduction_lib.standardized(gradients, variables)
        ]
        inner_update.apply(self.local_optimizer, gradients, variables)
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is None:
                continue
            index = self._trainable_variables_indices[self._var_key(variable)]
            self._seen.add(index)
            if self._accumulators:
                replica_variables.add(self._accumulators[index], gradient)
        count = replica_variables.read(self._pending) + 1
        replica_variables.assign(self._pending, count)

        def exchange():
            self._exchange(self._period, here)
            return tf.constant(True)

        if tf.executing_eagerly():
            if count == self._period:
                exchange()
        else:
            tf.cond(
                tf.equal(count, self._period),
                exchange,
                lambda: tf.constant(False),
            )

    def _exchange(self, num_steps: int, here: replica_context.Here) -> None:
        """Applies what `num_steps` local steps have accumulated."""
        groups = cross_shard_optimizer.groups_for(
            self._group_assignment, here.num_replicas
        )
        read = replica_variables.read
        totals = []
        for index, variable in enumerate(self._trainable_variables):
            if index not in self._seen:
                totals.append(None)
            elif self._accumulators:
                totals.append(
                    tf.cast(read(self._accumulators[index]), variable.dtype)
                )
            else:
                totals.append(read(self._center[index]) - read(variable))
        totals = reduction_lib.group_sum(
            totals,
            self._trainable_variables,
            here=here,
            groups=groups,
            communication=self._communication,
            known_patterns=self._known_patterns,
        )
        factor = 1.0
        if self._reduction == "mean":
            factor /= groups.group_size
        if self._normalize:
            factor /= num_steps
        inner_update.apply(
            self.inner_optimizer,
            [reduction_lib.scaled(total, factor) for total in totals],
            self._center,
        )
        for index, variable in enumerate(self._trainable_variables):
            if index in self._seen:
                replica_variables.assign(variable, read(self._center[index]))
        for total in self._accumulators:
            replica_variables.assign(total, tf.zeros(total.shape, total.dtype))
        replica_variables.assign(self._pending, 0)
        replica_variables.assign(self._exchanges, read(self._exchanges) + 1)

    def show_center(self, shown: bool) -> None:
        """Puts the center into the model, or the local variables back.

        While it is shown the optimizer must not be applied. Call it outside of
        `strategy.run`. `SwapCenterWeights` does it in `fit`.

        Args:
          shown: Whether the model's variables hold the center.

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
        if tf.distribute.has_strategy() and not (
            tf.distribute.in_cross_replica_context()
        ):
            raise RuntimeError(
                f"{self.name}.show_center() is called in replica context. Call"
                " it outside of strategy.run()."
            )
        if self.built and shown != self._shows_center:
            strategy = self._distribution_strategy
            with strategy.scope():
                for variable, center in zip(
                    self._trainable_variables, self._center, strict=True
                ):
                    replica_variables.swap(variable, center, strategy)
            self._set_untracked("_shows_center", shown)

    def finalize_variable_values(self, var_list) -> None:
        """Makes an early exchange if steps are pending, on all replicas.

        Then the model holds the center. `fit` calls it at its end.

        Args:
          var_list: The model's trainable variables.
        """
        del var_list
        if not self.built:
            return
        self.show_center(False)
        strategy = self._distribution_strategy
        [pending, *_] = strategy.experimental_local_results(self._pending.value)
        pending = int(pending)

        def on_replica():
            self._exchange(pending, replica_context.current())

        if pending and strategy.num_replicas_in_sync == 1:
            on_replica()
        elif pending:
            with strategy.scope():
                tf.function(lambda: strategy.run(on_replica))()
        self.inner_optimizer.finalize_variable_values(self._center)
        if self.inner_optimizer.use_ema:
            for variable, center in zip(
                self._trainable_variables, self._center, strict=True
            ):
                replica_variables.copy(center, variable, strategy)

    def _what_a_save_loses(self) -> str | None:
        if self._distribution_strategy.num_replicas_in_sync == 1:
            return None
        return "trains each replica's own variables and slots."

    def get_config(self) -> dict:
        """The arguments, for serialization.

        Returns:
          A dict for `from_config`.

        Example:

        >>> tf_xshard.AGNOptimizer(keras.optimizers.SGD()).get_config()[
        ...     "communication_period"]
        10
        """
        return {
            **super().get_config(),
            "communication_period": self._period,
            "local_optimizer": keras.saving.serialize_keras_object(
                self.local_optimizer
            ),
            "accumulate": self._accumulate,
            "normalize": self._normalize,
            "reduction": self._reduction,
            "group_assignment": (
                self._group_assignment and self._group_assignment.to_list()
            ),
            "communication": self._communication.get_config(),
        }


def _check_count(argument: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} must be an int, got {value!r}.")
    if value < 1:
        raise ValueError(f"{argument} must be positive, got {value}.")


def _refuse_inside(optimizer) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return
    for one in inner_update.descendants(optimizer):
        if inner_update.is_wrapper(one):
            raise ValueError(
                f"{type(one).__name__} is inside AGNOptimizer, which reduces by"
                " itself. Give the optimizer that is inside of it."
            )
        if isinstance(one, keras.optimizers.LossScaleOptimizer) or (
            one.loss_scale_factor
        ):
            raise ValueError(
                "AGNOptimizer takes no loss scaling: replicas would scale apart"
                " between exchanges. Use bfloat16 (mixed_bfloat16), which needs"
                " none."
            )
