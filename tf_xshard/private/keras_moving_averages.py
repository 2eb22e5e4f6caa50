"""The moving averages of weights (`use_ema`) that SwapEMAWeights looks for.

It unwraps one level of nesting and reads a private attribute of the optimizer,
`_model_variables_moving_average`. Present in Keras 3.12 to 3.16.
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
    """An optimizer whose averages may not be those of the model's variables."""

    @property
    def _model_variables_moving_average(self) -> list:
        why = self.__dict__.get("_refuses_to_swap")
        if why and _swaps_averages():
            raise ValueError(why)
        try:
            return self.__dict__["_model_variables_moving_average"]
        except KeyError:
            raise AttributeError("_model_variables_moving_average") from None

    @_model_variables_moving_average.setter
    def _model_variables_moving_average(self, value: list) -> None:
        self.__dict__["_model_variables_moving_average"] = value


def refuse_swapped_averages(
    optimizer: keras.optimizers.Optimizer, why: str
) -> None:
    """Makes SwapEMAWeights fail on a local optimizer.

    Args:
      optimizer: One whose averages do not have the shapes of the model's
        variables, or are not theirs.
      why: The error's text.
    """
    object.__setattr__(optimizer, "_refuses_to_swap", why)


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
