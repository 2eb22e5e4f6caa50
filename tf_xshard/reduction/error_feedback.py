"""Adds the rounding errors of a replica's gradients to its next gradients.

gradient + residual --> what is sent
residual            <-- gradient + residual - what the receiver sees of it

`Residuals` keeps the loss between steps; within a step it is a `Carry`.
Source: Seide et al. 2014; Karimireddy et al. 2019, arXiv 1901.09847.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.distribute import replica_variables

# Maps `replica_variables.key` of a variable to the error to add to its next
# gradient, in the gradient's units. None without error feedback.
Carry = dict[int, tf.Tensor] | None


def added(gradient: tf.Tensor, variable: Any, carry: Carry) -> tf.Tensor:
    """Adds the carry of its variable to a dense gradient."""
    lost = (carry or {}).get(replica_variables.key(variable))
    return (
        gradient if lost is None else gradient + tf.cast(lost, gradient.dtype)
    )


def left(variables: Sequence, lost: Sequence[tf.Tensor] | None) -> Carry:
    """Makes a carry of the errors of each variable's gradient."""
    if lost is None:
        return None
    return {
        replica_variables.key(v): value
        for v, value in zip(variables, lost, strict=True)
    }


def unscaled(carry: Carry, unit: Any) -> Carry:
    """Returns a carry divided by `unit` (the loss scale)."""
    if carry is None or not tf.is_tensor(unit):
        return carry
    return {
        name: value / tf.cast(unit, value.dtype)
        for name, value in carry.items()
    }


class Residuals:
    """Holds a residual variable for each trained variable on each replica."""

    def __init__(self, trained: Sequence) -> None:
        self._of: dict[int, keras.Variable] = {}
        # A key is an id, which a deleted variable's successor may have.
        self._trained: list = []
        self.add(trained)

    @property
    def variables(self) -> list[keras.Variable]:
        """The residual variables, in the order of their creation."""
        return list(self._of.values())

    def missing(self, trained: Sequence) -> list:
        """Returns the trained variables that have no residual."""
        return [v for v in trained if replica_variables.key(v) not in self._of]

    def add(self, trained: Sequence) -> None:
        """Creates residuals of trained variables."""
        self._trained += trained
        for variable in trained:
            self._of[replica_variables.key(variable)] = (
                replica_variables.accumulator_of(
                    variable,
                    f"{replica_variables.flat_name(variable)}_residual",
                )
            )

    def read(self, unit: Any) -> Carry:
        """Returns this replica's carry, times `unit` (the loss scale)."""
        result = {}
        for name, residual in self._of.items():
            result[name] = replica_variables.read(residual)
            if tf.is_tensor(unit):
                result[name] *= tf.cast(unit, result[name].dtype)
        return result

    def keep(self, carry: Carry, is_applied: tf.Tensor | None) -> None:
        """Keeps a carry, unless the step is skipped."""
        found = {
            name: value
            for name, value in (carry or {}).items()
            if name in self._of
        }

        def assign() -> None:
            for name, value in found.items():
                replica_variables.assign(self._of[name], value)

        if is_applied is None:
            assign()
        else:
            replica_variables.cond(is_applied, assign)
