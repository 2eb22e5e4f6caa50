"""AGNOptimizer: local steps on each replica, an exchange now and then."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import replica_context
from tf_xshard.distribute import replica_variables
from tf_xshard.optimizers import accumulation
from tf_xshard.optimizers import agn_arguments
from tf_xshard.optimizers import cross_shard_optimizer
from tf_xshard.optimizers import inner_update
from tf_xshard.optimizers import tree
from tf_xshard.reduction import group_sum as reduction_lib


@keras.saving.register_keras_serializable("tf_xshard")
class AGNOptimizer(cross_shard_optimizer.ReducingOptimizer):
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
        are never reset. Default: a copy of the inner one. (A legacy `.h5` file
        needs two different names of optimizers.)
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
        agn_arguments.check(
            num_worker, communication_period, accumulate, normalize
        )
        agn_arguments.check_optimizers(inner_optimizer, local_optimizer)
        if local_optimizer is None and isinstance(
            inner_optimizer, keras.optimizers.Optimizer
        ):
            local_optimizer = agn_arguments.copied(inner_optimizer)
        super().__init__(
            inner_optimizer,
            reduction,
            group_assignment,
            communication,
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
        self._set_untracked("_known_patterns", {})
        self._set_untracked("_seen", accumulation.SeenVariables(name))

    @property
    def communication_period(self) -> int:
        """Steps from one exchange to the next."""
        return self._period

    @property
    def center_variables(self) -> list[keras.Variable]:
        """The center, in the order of the trainable variables."""
        return list(self._center) if self.built else []

    @property
    def center_is_shown(self) -> bool:
        """Whether the model's variables hold the center now."""
        if not self.built:
            return False
        [shown, *_] = self._distribution_strategy.experimental_local_results(
            self._shown.value
        )
        return bool(shown)

    @property
    def exchanges(self) -> keras.Variable | tf.Tensor:
        """How many exchanges there were; a variable when it is built."""
        return self._exchanges if self.built else tf.constant(0, tf.int64)

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

    def exclude_from_weight_decay(self, var_list=None, var_names=None) -> None:
        """Excludes variables from both optimizers' weight decay.

        Args:
          var_list: Variables to exclude, or None.
          var_names: Strings; a variable whose name contains one is excluded.

        Raises:
          ValueError: If the optimizer has been built.
        """
        # The center does not exist yet; it will have the variables' paths.
        names = [*(var_names or ())] + [
            f"{re.escape(variable.path)}$" for variable in var_list or ()
        ]
        for one in (self.inner_optimizer, self.local_optimizer):
            one.exclude_from_weight_decay(var_names=names)

    def _all_optimizers(self) -> list[keras.optimizers.Optimizer]:
        return super()._all_optimizers() + list(
            tree.descendants(self.local_optimizer)
        )

    def _build(self, variables) -> None:
        agn_arguments.check_variables(variables)
        # Before this optimizer's own name becomes a part of their paths.
        self._center = [replica_variables.copy_of(v) for v in variables]
        super()._build(variables)

    def _build_inner(self, variables) -> None:
        self._accumulators = (
            [
                replica_variables.accumulator_of(
                    v, f"{replica_variables.flat_name(v)}_sum"
                )
                for v in variables
            ]
            if self._accumulate == "gradients"
            else []
        )
        self._pending = replica_variables.make((), "int32", "pending")
        self._exchanges = replica_variables.make((), "int64", "exchanges")
        # Saved, since a file can be written while the center is shown.
        self._shown = replica_variables.make((), "int32", "center_is_shown")
        self.inner_optimizer.build(self._center)
        with keras.name_scope("local"):
            self.local_optimizer.build(variables)
        inner_update.make_local(self.local_optimizer)

    def _step(self, gradients, variables, here: replica_context.Here) -> None:
        own = self._distribution_strategy
        if own.num_replicas_in_sync > 1 and not tf.distribute.has_strategy():
            raise RuntimeError(
                f"{self.name} was made in the scope of {type(own).__name__} and"
                " is applied outside of it, where there are no workers. Apply"
                " it in strategy.run()."
            )
        pending = replica_variables.read(self._pending)
        replica_variables.when(
            replica_variables.read(self._shown) > 0, self._hide_center_here
        )
        replica_variables.when(tf.equal(pending, 0), self._start_period)
        gradients = [
            reduction_lib.scaled(gradient, self._arriving_divisor(here))
            for gradient in reduction_lib.standardized(gradients, variables)
        ]
        inner_update.apply(self.local_optimizer, gradients, variables)
        indices = self._indices(variables)
        for gradient, index in zip(gradients, indices, strict=True):
            if gradient is None:
                continue
            variable = self._trainable_variables[index]
            self._seen.add(index, replica_variables.flat_name(variable))
            if self._accumulators:
                replica_variables.add(self._accumulators[index], gradient)
        pending += 1
        replica_variables.assign(self._pending, pending)
        replica_variables.when(
            # More, if steps of a longer period were loaded.
            pending >= self._period,
            lambda: self._exchange(pending, indices, here),
        )

    def _indices(self, variables) -> list[int]:
        return [
            self._trainable_variables_indices[self._var_key(variable)]
            for variable in variables
            if self._var_key(variable) in self._trainable_variables_indices
        ]

    def _hide_center_here(self) -> None:
        for variable, center in zip(
            self._trainable_variables, self._center, strict=True
        ):
            replica_variables.swap_here(variable, center)
        replica_variables.assign(self._shown, 0)

    def _start_period(self) -> None:
        """Makes the center what the model holds.

        They are equal, unless the model's values have been set since the last
        exchange (`set_weights`, `EarlyStopping`), which then count.
        """
        replica_variables.assign_all(self._center, self._trainable_variables)

    def _exchange(self, num_steps, indices, here: replica_context.Here):
        """Applies what so many local steps have accumulated.

        Of all variables but those that are frozen and not among the call's.
        """
        self._seen.used()
        groups = cross_shard_optimizer.groups_for(
            self._group_assignment, here.num_replicas
        )
        totals = [
            self._accumulated(index, num_steps)
            if index in indices or getattr(variable, "trainable", True)
            else None
            for index, variable in enumerate(self._trainable_variables)
        ]
        totals = reduction_lib.group_sum(
            totals,
            self._trainable_variables,
            here=here,
            groups=groups,
            communication=self._communication,
            known_patterns=self._known_patterns,
        )
        if self._reduction == "mean":
            totals = [
                reduction_lib.scaled(total, 1 / groups.group_size)
                for total in totals
            ]
        present = [
            (total, center)
            for total, center in zip(totals, self._center, strict=True)
            if total is not None
        ]
        if present:
            inner_update.apply(
                self.inner_optimizer, *map(list, zip(*present, strict=True))
            )
        replica_variables.assign_all(self._trainable_variables, self._center)
        for total in self._accumulators:
            replica_variables.assign(total, tf.zeros(total.shape, total.dtype))
        replica_variables.assign(self._pending, 0)
        replica_variables.add(self._exchanges, 1)

    def _accumulated(self, index: int, num_steps):
        """What this replica has for the exchange, in the variable's type."""
        variable = self._trainable_variables[index]
        # After a restore nothing has been seen, and anything may be there.
        if index not in self._seen and len(self._seen):
            return None
        read = replica_variables.read
        total = (
            read(self._accumulators[index])
            if self._accumulators
            else read(self._center[index]) - read(variable)
        )
        if self._normalize:
            total /= tf.cast(num_steps, total.dtype)
        return tf.cast(total, variable.dtype)

    def show_center(self, shown: bool) -> None:
        """Puts the center into the model, or the local variables back.

        A step puts the local variables back by itself, after its gradients have
        been computed. Call it outside of `strategy.run`. `SwapCenterWeights`
        does it in `fit`.

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
        replica_context.refuse_replica_context(f"{self.name}.show_center()")
        if self.built and shown != self.center_is_shown:
            strategy = self._distribution_strategy
            with strategy.scope():
                for variable, center in zip(
                    self._trainable_variables, self._center, strict=True
                ):
                    replica_variables.swap(variable, center, strategy)
                self._shown.assign(int(shown))

    def finalize_variable_values(self, var_list) -> None:
        """Makes an early exchange if steps are pending, on all replicas.

        Then the model holds the center. `fit` calls it at its end.

        Args:
          var_list: The model's trainable variables.
        """
        if not self.built:
            return
        self.show_center(False)
        strategy = self._distribution_strategy
        [pending, *_] = strategy.experimental_local_results(self._pending.value)
        pending = int(pending)

        def on_replica():
            self._exchange(
                pending, self._indices(var_list), replica_context.current()
            )

        if pending and strategy.num_replicas_in_sync == 1:
            on_replica()
        elif pending:
            with strategy.scope():
                tf.function(lambda: strategy.run(on_replica))()
        self.inner_optimizer.finalize_variable_values(self._center)
        if self.inner_optimizer.use_ema:
            with strategy.scope():
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
        }
