"""What users and `fit` read, set and end of local training with a center."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.collectives import recorder
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.optimizers import accumulation
from tf_xshard.optimizers import center as center_lib
from tf_xshard.optimizers import stack
from tf_xshard.optimizers import tree
from tf_xshard.optimizers import wrapper
from tf_xshard.private import keras_optimizer_state


class LocalTraining(wrapper.OptimizerWrapper):
    """The part of AGNOptimizer around its steps: what it shows and counts.

    The model's variables are local to each replica; `inner_optimizer` updates
    the center, `local_optimizer` the local variables.
    """

    local_optimizer: keras.optimizers.Optimizer
    _center: list[keras.Variable]
    _center_pairs: center_lib.Center
    _exchanges: keras.Variable
    _seen: accumulation.SeenVariables
    communication_period: Any

    def forgetting_traces(self) -> contextlib.AbstractContextManager:
        """See the base class."""
        return self._seen.unchanged()

    @property
    def center_variables(self) -> list[keras.Variable]:
        """The center, in the order of the trainable variables.

        While the model holds the center, they hold the local variables.
        """
        return list(self._center) if self.built else []

    @property
    def center_is_shown(self) -> bool:
        """Whether the model's variables currently hold the center."""
        if not self.built:
            return False
        return self._center_pairs.is_shown

    @property
    def exchanges(self) -> keras.Variable | tf.Tensor:
        """The number of exchanges so far; a variable once built."""
        return self._exchanges if self.built else tf.constant(0, tf.int64)

    @property
    def iterations(self) -> Any:
        """The number of local steps."""
        return self.local_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The local optimizer's learning rate; settable.

        The center's is `inner_optimizer.learning_rate`.
        """
        return self.local_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.local_optimizer.learning_rate = value

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """A local MultiOptimizer's optimizers; others have none."""
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

        Call it before the first step: functions that have been traced do not
        notice it.

        Args:
          var_list: Variables to exclude, or None.
          var_names: Strings; a variable whose name contains one is excluded.
        """
        for one in (self.inner_optimizer, self.local_optimizer):
            one.exclude_from_weight_decay(var_list, var_names)
        if self.built:
            self._exclude_center()

    def _exclude_center(self) -> None:
        """Excludes the centers of the variables that the inner one excludes."""
        center_of = {id(local): center for local, center in self._center_pairs}
        for one in tree.descendants(self.inner_optimizer):
            excluded = keras_optimizer_state.excluded_from_weight_decay(
                one, [local for local, _ in self._center_pairs]
            )
            if excluded:
                one.exclude_from_weight_decay(
                    [center_of[id(local)] for local in excluded]
                )

    def show_center(self, shown: bool) -> None:
        """Puts the center, or the local variables, into the model.

        A step restores the local variables by itself, after its gradients have
        been computed. Call this outside of `strategy.run`. `SwapCenterWeights`
        calls it in `fit`.

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

    def finalize_variable_values(self, var_list: Sequence) -> None:
        """Does an early exchange on all replicas if steps are pending.

        Afterwards the model holds the center. `fit` calls this at its end.

        Args:
          var_list: The model's trainable variables.
        """
        if not self.built:
            return
        with stack.call_of(self):
            self._finalize(var_list)

    def _finalize(self, var_list: Sequence) -> None:
        self.show_center(False)
        strategy = self._strategy
        [pending, *_] = strategy.experimental_local_results(self._pending.value)
        pending = int(pending)

        def on_replica() -> None:
            self._exchange(
                pending,
                keras_optimizer_state.indices_of(self, var_list),
                site_lib.current(),
            )

        if pending and strategy.num_replicas_in_sync == 1:
            on_replica()
        elif pending:
            with strategy.scope():
                exchange = tf.function(
                    lambda: strategy.run(on_replica), autograph=False
                )
                # Not called: TensorFlow would warn of retracing in later fits.
                exchange.get_concrete_function()()
        self.inner_optimizer.finalize_variable_values(self._center)
        if self.inner_optimizer.use_ema:
            self._center_pairs.copy_into_model()

    def _exchange_in_step(self, *args: Any) -> None:
        with recorder.labelled("exchange", every=self.communication_period):
            self._exchange(*args)

    def _exchange(
        self,
        num_steps: int | tf.Tensor,
        indices: Sequence[int],
        site: site_lib.Site,
    ) -> None:
        """Applies what `num_steps` local steps accumulated to the center."""
        raise NotImplementedError

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
            for one in tree.descendants(self.local_optimizer)
            for variable in one.variables
        ]
        tensorflow_variable = replica_variables.tensorflow_variable
        return {
            id(tensorflow_variable(variable)): kind
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
