"""AGNOptimizer's center, next to the local variables of each replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.distribute import replica_variables


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
        """Returns the change by the local steps, center - local."""
        read = replica_variables.read
        return read(self.variables[index]) - read(self._local[index])
