"""The moving averages of weights (`use_ema`) that SwapEMAWeights looks for.

It unwraps one level of nesting and reads a private attribute of the optimizer,
`_model_variables_moving_average`. Present in Keras 3.12 to 3.15.
"""

from __future__ import annotations

import sys
import types

import keras

# An attribute of optimizers that have been built with `use_ema`.
KERAS_PRIVATE_ATTRIBUTES = ("_model_variables_moving_average",)


class SwappableAverages:
    """A wrapper whose moving averages SwapEMAWeights can find.

    SwapEMAWeights unwraps one level of nesting and reads a private attribute.
    """

    _updating_optimizer: keras.optimizers.Optimizer

    @property
    def _model_variables_moving_average(self) -> list:
        return self._updating_optimizer._model_variables_moving_average

    @_model_variables_moving_average.setter
    def _model_variables_moving_average(self, value: list) -> None:
        # The base class' constructor sets a default before there is an inner
        # optimizer.
        if "inner_optimizer" in self.__dict__:
            self._updating_optimizer._model_variables_moving_average = value


class Averages:
    """An optimizer whose averages can be those of AGNOptimizer's center."""

    @property
    def _model_variables_moving_average(self) -> list:
        if self.__dict__.get("_updates_a_center") and _swaps_averages():
            raise ValueError(
                "SwapEMAWeights can't be used with AGNOptimizer: the averages"
                " are those of the center, not of the variables in the model."
                " Use tf_xshard.SwapCenterWeights to evaluate the center; at"
                " the end of fit the model gets the averages."
            )
        try:
            return self.__dict__["_model_variables_moving_average"]
        except KeyError:
            raise AttributeError("_model_variables_moving_average") from None

    @_model_variables_moving_average.setter
    def _model_variables_moving_average(self, value: list) -> None:
        self.__dict__["_model_variables_moving_average"] = value


def refuse_swapped_averages(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes SwapEMAWeights fail on a local optimizer that updates a center."""
    object.__setattr__(optimizer, "_updates_a_center", True)


def _swaps_averages() -> bool:
    """Whether SwapEMAWeights is among the callers of this function."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(
            frame.f_locals.get("self"), keras.callbacks.SwapEMAWeights
        ):
            return True
        frame = frame.f_back
    return False
