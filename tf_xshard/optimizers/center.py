"""AGNOptimizer's center, beside the local variables of each replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.distribute import replica_variables


class Center:
    """One center variable for each local variable that the model holds.

    The methods that end in `_here` are called in replica context and change
    this replica's values; the others outside of it, and change all.
    """

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
        """(local variable, center) pairs."""
        return iter(list(zip(self._local, self.variables, strict=True)))

    @property
    def is_shown(self) -> bool:
        """Whether the model's variables currently hold the center."""
        [shown, *_] = self._of_strategy.experimental_local_results(
            self._shown_variable.value
        )
        return bool(shown)

    def show(self, shown: bool) -> None:
        """Swaps the center and the local variables, if that is not so yet."""
        if shown == self.is_shown:
            return
        with self._of_strategy.scope():
            for variable, center in self:
                replica_variables.swap(variable, center, self._of_strategy)
            self._shown_variable.assign(int(shown))

    def copy_into_model(self) -> None:
        """Gives the local variables the center's values."""
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
        """Sets the center to the model's values.

        They are equal unless the model's values have been set since the last
        exchange (`set_weights`, `EarlyStopping`); then the new values win.
        """
        for variable, center in self:
            replica_variables.assign(center, replica_variables.read(variable))

    def adopt_here(self) -> None:
        """Sets the local variables to the center."""
        for variable, center in self:
            replica_variables.assign(variable, replica_variables.read(center))

    def change_here(self, index: int) -> tf.Tensor:
        """What local steps have changed: center - local."""
        read = replica_variables.read
        return read(self.variables[index]) - read(self._local[index])
