"""Shows SwapEMAWeights the moving averages of weights (`use_ema`).

SwapEMAWeights unwraps one level of nesting and reads the optimizer's private
`_model_variables_moving_average`. Present in Keras 3.12 to 3.16.
"""

from __future__ import annotations

from typing import Any

import keras

from tf_xshard.private import frames
from tf_xshard.private import names

# Optimizers that have been built with `use_ema` have this attribute.
names.attributes("SwapEMAWeights", "_model_variables_moving_average")


def _forwarded_averages(self: Any) -> list:
    return self._updating_optimizer._model_variables_moving_average


def _forward_averages(self: Any, value: list) -> None:
    # The base class's constructor sets a default before there is an inner
    # optimizer.
    if "inner_optimizer" in self.__dict__:
        self._updating_optimizer._model_variables_moving_average = value


# An optimizer around the optimizer with averages needs this attribute, since
# SwapEMAWeights unwraps only one level of nesting.
FORWARDED = property(_forwarded_averages, _forward_averages)


class Averages:
    """Marks an optimizer whose averages may not be the model variables'."""

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
    """Makes SwapEMAWeights raise ValueError when it reads the averages."""
    object.__setattr__(optimizer, "_refuses_to_swap", why)


def _swaps_averages() -> bool:
    """Returns True if SwapEMAWeights is among the callers of this function."""
    kind = keras.callbacks.SwapEMAWeights
    return any(
        isinstance(frame.f_locals.get("self"), kind)
        for frame in frames.callers()
    )
