"""What a variable's gradient is, and what may be done with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tf_xshard.distribute import replica_variables


@dataclasses.dataclass(frozen=True)
class VariableRole:
    """One of three roles.

    Attributes:
      name: `"trained"`, `"overwritten"` or `"local"`.
      has_loss_gradient: Whether what arrives as its gradient is one of the
        loss, which was divided by N, and which hooks, clipping, error feedback,
        sharding and the reduction of the optimizer apply to. If not, the
        replicas' values are averaged, exactly.
      kind_of_state: Its kind in `GroupState`; None for that of a weight, or of
        a statistic if it is not trainable.
    """

    name: str
    has_loss_gradient: bool
    kind_of_state: str | None = None


TRAINED = VariableRole("trained", True)
# Keras assigns it its "gradient", a statistic of the replica, in float8
# training.
OVERWRITTEN = VariableRole("overwritten", False, "statistic")
# Each replica's own; TensorFlow combines the values when it reads it. Its
# gradient is reduced like any other.
LOCAL = VariableRole("local", True, "local")


def role_of(variable: Any) -> VariableRole:
    """The role of a Keras or TensorFlow variable."""
    if getattr(variable, "overwrite_with_gradient", False):
        return OVERWRITTEN
    held = replica_variables.tensorflow_variable(variable)
    if held.synchronization == tf.VariableSynchronization.ON_READ:
        return LOCAL
    return TRAINED


def kind_of_state(variable: Any) -> str:
    """The kind of a variable that is held by itself in `GroupState`."""
    plain = "weight" if variable.trainable else "statistic"
    return role_of(variable).kind_of_state or plain
