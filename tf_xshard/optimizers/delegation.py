"""Attributes of a wrapper that are set, read and saved on the inner optimizer.

Each one is forwarded by name; there is no `__getattr__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tf_xshard.optimizers import stack
from tf_xshard.private import keras_moving_averages
from tf_xshard.private import keras_optimizer_state


def _forwarded(name: str) -> property:
    """An attribute that lives on the optimizer that updates the variables."""

    def get(self: Any) -> Any:
        return getattr(self._updating_optimizer, name)

    def set_(self: Any, value: Any) -> None:
        # The base class' constructor sets its defaults before there is an inner
        # optimizer; ignore them.
        if "inner_optimizer" in self.__dict__:
            setattr(self._updating_optimizer, name, value)

    return property(get, set_, doc=f"The inner optimizer's `{name}`.")


class Delegation(
    keras_moving_averages.SwappableAverages, keras.optimizers.Optimizer
):
    """The part of a wrapper that delegates to `inner_optimizer`."""

    @property
    def _updating_optimizer(self) -> keras.optimizers.Optimizer:
        inner = self.inner_optimizer
        while isinstance(inner, keras.optimizers.LossScaleOptimizer):
            inner = inner.inner_optimizer
        return inner

    weight_decay = _forwarded("weight_decay")
    clipnorm = _forwarded("clipnorm")
    global_clipnorm = _forwarded("global_clipnorm")
    clipvalue = _forwarded("clipvalue")
    use_ema = _forwarded("use_ema")
    ema_momentum = _forwarded("ema_momentum")
    ema_overwrite_frequency = _forwarded("ema_overwrite_frequency")
    gradient_accumulation_steps = _forwarded("gradient_accumulation_steps")

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """A MultiOptimizer's optimizers; other inner optimizers have none."""
        return self._updating_optimizer.optimizers

    @property
    def variables(self) -> list[keras.Variable]:
        """This optimizer's variables, then the inner optimizer's."""
        return self._own_variables + self.inner_optimizer.variables

    @property
    def _own_variables(self) -> list[keras.Variable]:
        return keras_optimizer_state.own_variables(self)

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate; settable."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def iterations(self) -> Any:
        """The inner optimizer's number of updates."""
        return self.inner_optimizer.iterations

    def finalize_variable_values(self, var_list: Sequence) -> None:
        """Makes the inner optimizer set final values (its moving averages).

        Args:
          var_list: The model's trainable variables.
        """
        with stack.call_of(self):
            self.inner_optimizer.finalize_variable_values(var_list)

    def exclude_from_weight_decay(
        self,
        var_list: Sequence | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Excludes variables from the inner optimizer's weight decay.

        Call it before the first step: functions that have been traced do not
        notice it.

        Args:
          var_list: Variables to exclude, or None.
          var_names: Strings; a variable whose name contains one is excluded.
        """
        self._updating_optimizer.exclude_from_weight_decay(var_list, var_names)

    def set_weights(self, weights: Sequence) -> None:
        """Sets the values of `variables`, the inner optimizer's included.

        If the optimizer is not built yet, they are set when it is.

        Args:
          weights: One array per variable, in the order of `variables`.

        Raises:
          ValueError: If the number of arrays or a shape differs; then nothing
            is changed.
        """
        # Copies, because a loader closes its file before they are used.
        weights = [np.array(weight) for weight in weights]
        if not self.built:
            self._set_untracked("_pending_weights", weights)
            return
        self._check_weights(weights)
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def _check_weights(self, weights: Sequence[np.ndarray]) -> None:
        variables = self.variables
        if len(weights) != len(variables):
            raise ValueError(
                f"{self.name} has {len(variables)} variables, got"
                f" {len(weights)} weights. Was it saved with another inner"
                " optimizer?"
            )
        for variable, weight in zip(variables, weights, strict=True):
            if tuple(variable.shape) != weight.shape:
                raise ValueError(
                    f"{self.name}: variable {variable.path!r} has shape"
                    f" {tuple(variable.shape)}, got a weight of shape"
                    f" {weight.shape}."
                )

    def _set_untracked(self, name: str, value: Any) -> None:
        """Sets an attribute that Keras and TensorFlow neither wrap nor save."""
        object.__setattr__(self, name, value)
