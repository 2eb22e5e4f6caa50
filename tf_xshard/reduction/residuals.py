"""What communication has lost of a replica's gradients, kept for its next ones.

gradient + residual --> what is sent
residual            <-- gradient + residual - what the receiver sees of it

Error feedback (Seide et al. 2014; Karimireddy et al. 2019, arXiv 1901.09847).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.distribute import replica_variables


class _Step(threading.local):
    """What a step notes until it ends; each replica has a thread."""

    def __init__(self) -> None:
        self.unit: Any = 1
        self.updates: list[tuple[keras.Variable, tf.Tensor]] = []


class Residuals:
    """One variable for each trained variable, on each replica.

    Args:
      variables: The trained variables.
    """

    def __init__(self, variables: Sequence) -> None:
        self.variables: list[keras.Variable] = [
            replica_variables.accumulator_of(
                v, f"{replica_variables.flat_name(v)}_residual"
            )
            for v in variables
        ]
        self._of = {
            _key(v): residual
            for v, residual in zip(variables, self.variables, strict=True)
        }
        self._step = _Step()

    def in_units_of(self, unit: Any) -> None:
        """Sets what the gradients of this step are multiplied by.

        Args:
          unit: A number or a scalar tensor, such as the loss scale; residuals
            are kept without it.
        """
        self._step.unit = unit

    def added_to(
        self, gradients: Sequence[tf.Tensor], variables: Sequence
    ) -> list[tf.Tensor]:
        """This replica's gradients with what was lost before.

        Args:
          gradients: Dense tensors.
          variables: The variables they belong to.

        Returns:
          Tensors; the gradient itself for a variable without a residual.
        """
        result = []
        for gradient, variable in zip(gradients, variables, strict=True):
            residual = self._of.get(_key(variable))
            if residual is not None:
                kept = replica_variables.read(residual)
                if tf.is_tensor(self._step.unit):
                    kept *= tf.cast(self._step.unit, kept.dtype)
                gradient += tf.cast(kept, gradient.dtype)
            result.append(gradient)
        return result

    def note(self, variables: Sequence, lost: Sequence[tf.Tensor]) -> None:
        """Takes what was lost now; `keep` makes it the residual.

        Args:
          variables: The variables whose gradients were communicated.
          lost: A tensor for each.
        """
        # A step that failed before `keep` may have left some.
        self._step.updates.clear()
        for variable, value in zip(variables, lost, strict=True):
            residual = self._of.get(_key(variable))
            if residual is not None:
                if tf.is_tensor(self._step.unit):
                    value /= tf.cast(self._step.unit, value.dtype)
                self._step.updates.append((residual, value))

    def keep(self, is_applied: tf.Tensor | None) -> None:
        """Ends a step.

        Args:
          is_applied: Whether what was communicated is used, a scalar bool
            tensor; if not, the residuals stay. None if it always is.
        """
        updates = list(self._step.updates)
        self._step.updates.clear()

        def assign() -> None:
            for residual, value in updates:
                replica_variables.assign(residual, value)

        if is_applied is None:
            assign()
        else:
            replica_variables.cond(is_applied, assign)


def _key(variable: Any) -> int:
    return id(replica_variables.tensorflow_variable(variable))
