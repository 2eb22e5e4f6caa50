"""AGNOptimizer: local steps on each replica, with periodic exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.optimizers import accumulation
from tf_xshard.optimizers import agn_arguments
from tf_xshard.optimizers import center as center_lib
from tf_xshard.optimizers import inner_update
from tf_xshard.optimizers import local_training
from tf_xshard.optimizers import tree
from tf_xshard.optimizers import wrapper_arguments
from tf_xshard.private import keras_moving_averages
from tf_xshard.private import keras_optimizer_state
from tf_xshard.reduction import gradients as gradients_lib


@keras.saving.register_keras_serializable("tf_xshard")
class AGNOptimizer(local_training.LocalTraining):
    """Accumulated gradient normalization: communicate every few steps.

    Each replica is a worker that trains its own copy of the variables. Every
    `communication_period` steps its accumulation, divided by the number of
    steps, is combined over the group, and the inner optimizer applies the
    result to a center. All workers of the group continue from it.

    ```
    each call             local    <-  local_optimizer(gradient)
                          sum      <-  sum + gradient
    each communication_   center   <-  inner_optimizer(mean over the group of
    period calls                                       sum / period)
                          local    <-  center;   sum <- 0
    ```

    With `accumulate="updates", normalize=False` and an inner `SGD(1.0)` this is
    local SGD (model averaging); with Nesterov momentum, DiLoCo.

    Between exchanges replicas do not communicate, so their variables differ,
    and TensorFlow shows and saves those of replica 0. At the end of `fit` the
    center is put into the model, after an early exchange if steps are pending.

    Args:
      inner_optimizer: The `keras.optimizers.Optimizer` of the center.
      num_worker: The number of replicas, checked if given. Default: None.
      communication_period: Steps from one exchange to the next, at least 1.
        Default: 10.
      local_optimizer: The optimizer of the replicas' own variables; its slot
        variables are never reset. Default: a copy of the inner optimizer. (A
        legacy `.h5` file needs two optimizers with different names.)
      accumulate: `"gradients"` (default), or `"updates"`: the change made by
        the local steps, center - local.
      normalize: Whether the accumulation is divided by its number of local
        steps, as in the paper. Default: True.
      reduction: `"mean"` (default) or `"sum"` over the replicas of a group.
      group_assignment: See `CrossShardOptimizer`. None (default) inside another
        wrapper takes that one's groups.
      loss_normalization: See `CrossShardOptimizer`.
      communication: A `Communication`. None (default) for its defaults.
      name: The optimizer's name.

    Raises:
      TypeError: If an argument has the wrong type.
      ValueError: If an argument is invalid, a LossScaleOptimizer or a
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

    _supports_loss_scaling = False

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
    ) -> None:
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
            reduction=reduction,
            reducer=wrapper_arguments.checked_reducer(
                group_assignment,
                communication,
                "follower" if group_assignment is None else "explicit",
            ),
            loss_normalization=loss_normalization,
            name=name,
            **kwargs,
        )
        inner_update.make_local(local_optimizer)
        self.local_optimizer = local_optimizer
        self._period = int(communication_period)
        self._accumulate = accumulate
        self._normalize = normalize
        self._set_untracked("_seen", accumulation.SeenVariables(name))

    @property
    def communication_period(self) -> int:
        """Steps from one exchange to the next."""
        return self._period

    def _build(self, variables: list) -> None:
        agn_arguments.check_variables(variables)
        # Before this optimizer's own name becomes part of their paths.
        self._center = [replica_variables.copy_of(v) for v in variables]
        super()._build(variables)

    def _build_inner(self, variables: list) -> None:
        accumulator = accumulation.GradientAccumulator(
            variables,
            "sum",
            self._seen,
            has_sums=self._accumulate == "gradients",
        )
        self._set_untracked("_accumulator", accumulator)
        # Checkpoints store the variables under this name.
        self._accumulators = accumulator.sums
        self._pending = replica_variables.make((), "int32", "pending")
        self._exchanges = replica_variables.make((), "int64", "exchanges")
        # Saved because a file can be written while the center is shown.
        self._shown = replica_variables.make((), "int32", "center_is_shown")
        pairs = center_lib.Center(
            variables, self._center, self._shown, self._strategy
        )
        self._set_untracked("_center_pairs", pairs)
        self._exclude_center()
        self.inner_optimizer.build(self._center)
        with keras.name_scope("local"):
            self.local_optimizer.build(variables)
        inner_update.make_local(self.local_optimizer)
        for one in tree.descendants(self.inner_optimizer):
            keras_moving_averages.refuse_swapped_averages(
                one,
                "SwapEMAWeights can't be used with AGNOptimizer: the averages"
                " are those of the center, not of the variables in the model."
                " Use tf_xshard.SwapCenterWeights to evaluate the center; at"
                " the end of fit the model gets the averages.",
            )

    def _step(
        self, gradients: list, variables: list, site: site_lib.Site
    ) -> None:
        agn_arguments.check_scope(self.name, self._strategy)
        pending = self._begin_step()
        gradients = [
            gradients_lib.scaled(gradient, self._gradient_multiplier(site))
            for gradient in gradients_lib.standardized(gradients, variables)
        ]
        inner_update.apply(self.local_optimizer, gradients, variables)
        weight = self._reducer.weight(site, self.reduction)
        gradients = [gradients_lib.scaled(g, weight) for g in gradients]
        indices = keras_optimizer_state.indices_of(self, variables)
        self._accumulator.add(gradients, indices)
        replica_variables.assign(self._pending, pending + 1)
        replica_variables.cond(
            # Greater if steps of a longer period were loaded.
            pending + 1 >= self._period,
            lambda: self._exchange_in_step(pending + 1, indices, site),
        )

    def _begin_step(self) -> tf.Tensor:
        """Puts the local variables into the model; starts a period if due.

        Returns:
          The number of steps in the period before this one, a scalar int32.
        """
        pending = replica_variables.read(self._pending)
        self._center_pairs.hide_here()
        replica_variables.cond(
            tf.equal(pending, 0), self._center_pairs.start_period_here
        )
        return pending

    def _exchange(
        self,
        num_steps: int | tf.Tensor,
        indices: Sequence[int],
        site: site_lib.Site,
    ) -> None:
        """Applies what `num_steps` local steps accumulated to the center.

        Skips variables that are frozen and not among the call's.

        Args:
          num_steps: The number of steps, an int or a scalar tensor.
          indices: The indices of the call's variables.
          site: Where the code runs.
        """
        self._seen.note_update()
        local = keras_optimizer_state.trainable_variables(self)
        totals = [
            self._accumulated(index, num_steps, site)
            if index in indices or getattr(variable, "trainable", True)
            else None
            for index, variable in enumerate(local)
        ]
        totals = self._reducer.reduce(totals, local, site, self.reduction)
        if self._reducer.residuals is not None:
            self._reducer.residuals.keep(None)
        self._update_center(totals)
        self._center_pairs.adopt_here()
        self._accumulator.reset()
        replica_variables.assign(self._pending, 0)
        replica_variables.add(self._exchanges, 1)

    def _accumulated(
        self, index: int, num_steps: int | tf.Tensor, site: site_lib.Site
    ) -> Any:
        """This replica's part of the exchange, in the variable's dtype."""
        # After a restore nothing has been seen, but any sum may be nonzero.
        if index not in self._seen and len(self._seen):
            return None
        divisor: int | tf.Tensor = 1
        if self._accumulate == "gradients":
            total = self._accumulator.read(index)
            divisor = self._reducer.weight(site, self.reduction)
        else:
            total = self._center_pairs.change_here(index)
        if self._normalize:
            divisor = divisor * num_steps
        if tf.is_tensor(divisor) or divisor != 1:
            total /= tf.cast(divisor, total.dtype)
        return tf.cast(total, self._center[index].dtype)

    def _update_center(self, totals: Sequence) -> None:
        """Applies reduced accumulations (None is skipped) to the center."""
        present = [
            (total, center)
            for total, center in zip(totals, self._center, strict=True)
            if total is not None
        ]
        if present:
            inner_update.apply(
                self.inner_optimizer, *map(list, zip(*present, strict=True))
            )

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
            **self._reducer_config(),
            "communication_period": self._period,
            "local_optimizer": keras.saving.serialize_keras_object(
                self.local_optimizer
            ),
            "accumulate": self._accumulate,
            "normalize": self._normalize,
        }
