"""Defines how a variable's gradient is reduced, and which stages apply."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tf_xshard.distribute import replica_variables


@dataclasses.dataclass(frozen=True)
class VariableRole:
    """Describes one of the four roles of a variable.

    Attributes:
      name: `"trained"`, `"overwritten"`, `"local"` or `"unreduced"`.
      has_loss_gradient: True if its gradient belongs to the loss, which was
        divided by N (replicas). Hooks, clipping, error feedback, sharding and
        the optimizer's reduction then apply. If False, the replicas' values are
        averaged exactly.
      kind_of_state: Its kind in `GroupState`. None means a weight if it is
        trainable, and a statistic if not.
      is_reduced: False if each replica applies its own gradient.
    """

    name: str
    has_loss_gradient: bool
    kind_of_state: str | None = None
    is_reduced: bool = True


TRAINED = VariableRole("trained", True)
# In float8 training, Keras assigns such a variable its "gradient", a statistic
# of the replica.
OVERWRITTEN = VariableRole("overwritten", False, "statistic")
# Each replica has its own value of such a variable. TensorFlow combines the
# values when it reads the variable. The gradient is reduced like any other.
LOCAL = VariableRole("local", True, "local")
# Only the optimizer knows this role, from its argument `local`.
UNREDUCED = VariableRole("unreduced", True, "local", is_reduced=False)


def role_of(variable: Any) -> VariableRole:
    """Returns the role of a Keras or TensorFlow variable."""
    if getattr(variable, "overwrite_with_gradient", False):
        return OVERWRITTEN
    held = replica_variables.tensorflow_variable(variable)
    if held.synchronization == tf.VariableSynchronization.ON_READ:
        return LOCAL
    return TRAINED


def kind_of_state(variable: Any) -> str:
    """Returns the kind in `GroupState` of a variable outside of any layer."""
    plain = "weight" if variable.trainable else "statistic"
    return role_of(variable).kind_of_state or plain
