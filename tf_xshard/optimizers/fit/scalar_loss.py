"""Defines `ScalarLoss`, for losses of one number that Keras does not divide."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard.private.keras import fit_internals


@keras.saving.register_keras_serializable("tf_xshard")
class ScalarLoss(keras.losses.Loss):
    """Wraps a loss function that returns one number, the mean over its rows.

    With N replicas, `fit` divides the losses of rows by N, but not a loss that
    is one number. Steps and the reported loss are then N times too large. This
    class also divides such a number, so that N replicas train like one device.

    Args:
      function: A function of (y_true, y_pred) that returns a scalar tensor.
      name: The loss's name. Default: the function's name, or "scalar_loss" for
        a lambda.

    Raises:
      TypeError: If `function` is not callable.
      ValueError: When the loss is called, if `function` does not return a
        scalar, or if `sample_weight` weights rows under several replicas.

    Example:

    >>> def mean_square(y_true, y_pred):
    ...     return keras.ops.mean(keras.ops.square(y_pred - y_true))
    >>> loss = tf_xshard.ScalarLoss(mean_square)
    >>> float(loss(np.zeros(4), np.full(4, 3.0)))
    9.0
    >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Input((2,)),
    ...                               keras.layers.Dense(1)])
    ...     model.compile("sgd", loss=loss)

    Source: `keras.losses.Loss`, which divides by the number of replicas after
    the reduction over rows.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not callable(function):
            raise TypeError(
                "ScalarLoss takes a function of (y_true, y_pred), got"
                f" {function!r}."
            )
        own_name = getattr(function, "__name__", "")
        # "<lambda>" is not a valid name of a scope.
        if name is None and own_name.isidentifier():
            name = own_name
        super().__init__(name=name, **kwargs)
        self._function = function

    def __call__(
        self, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> Any:
        """Returns the loss, divided by the number of replicas."""
        num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if num_replicas > 1 and _has_rows(sample_weight):
            raise ValueError(
                f"ScalarLoss({self.name}) got sample_weight of shape"
                f" {keras.ops.shape(sample_weight)} under {num_replicas}"
                " replicas. Its function returns one number for all rows, so"
                " row weights can't have the same effect as on one device. Pass"
                " compile() a loss that returns a value for each row, or"
                " multiply by the weights in the function."
            )
        if sample_weight is not None and not _has_rows(sample_weight):
            # With a scalar weight, Keras would make the row a scalar again.
            sample_weight = keras.ops.reshape(sample_weight, (1,))
        return super().__call__(y_true, y_pred, sample_weight)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the function's result as one row.

        Args:
          y_true: The labels, a tensor.
          y_pred: The predictions, a tensor.

        Returns:
          A tensor of shape [1].
        """
        value = keras.ops.convert_to_tensor(self._function(y_true, y_pred))
        if value.shape.rank not in (0, None):
            raise ValueError(
                f"ScalarLoss({self.name}) needs a function that returns one"
                f" number, but it returned the shape {value.shape}. Pass the"
                " function to compile() without ScalarLoss."
            )
        return keras.ops.reshape(value, (1,))

    def get_config(self) -> dict:
        """Returns the arguments, for serialization."""
        function = keras.saving.serialize_keras_object(self._function)
        return {**super().get_config(), "function": function}

    @classmethod
    def from_config(cls, config: Mapping) -> ScalarLoss:
        """Creates a loss from the dict of `get_config`.

        Args:
          config: The dict.
        """
        function = keras.saving.deserialize_keras_object(config["function"])
        return cls(**{**config, "function": function})


def _has_rows(sample_weight: Any) -> bool:
    return sample_weight is not None and keras.ops.ndim(sample_weight) > 0


def warn_about_scalar_losses(num_replicas: int) -> None:
    """Warns of losses that `fit` does not divide in the step being traced."""
    own = fit_internals.own_loss_of_the_step()
    if own is not None:
        _warn_about_own_loss(*own, num_replicas)
        return
    for loss, y_true, y_pred in fit_internals.losses_of_the_step():
        if isinstance(loss, ScalarLoss) or not _returns_a_scalar(
            loss, y_true, y_pred
        ):
            continue
        warnings.warn(
            f"The loss {loss.name!r} returns one number, which Keras does not"
            " divide by the number of replicas, unlike other losses. On"
            f" {num_replicas} replicas, the steps and the reported loss are"
            f" {num_replicas} times too large. Wrap the loss function in"
            " tf_xshard.ScalarLoss, or return a loss for each row.",
            stacklevel=2,
        )


def _warn_about_own_loss(
    model: str, loss: tf.Tensor, num_replicas: int
) -> None:
    """Warns if a model's own `compute_loss` does not divide its loss."""
    # Eager tensors do not tell how they were computed.
    if tf.executing_eagerly() or _is_divided(loss, num_replicas):
        return
    warnings.warn(
        f"{model}.compute_loss does not divide its loss, or a term of it, by"
        f" the number of replicas, unlike Keras. On {num_replicas} replicas,"
        f" the steps and the reported loss are {num_replicas} times too large."
        " Divide each mean by tf.distribute.get_strategy()"
        ".num_replicas_in_sync, or compute it with tf_xshard.ScalarLoss.",
        stacklevel=2,
    )


# A result of these operations is divided if every input is divided.
_SUMS = (
    *("Add", "AddN", "AddV2", "Cast", "Identity", "Neg", "Pack", "Sub"),
    *("Reshape", "Squeeze", "StopGradient", "Sum"),
)
_PRODUCTS = ("Div", "DivNoNan", "Mul", "RealDiv")
# What these operations compute is in another graph.
_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf")


def _is_divided(tensor: tf.Tensor, num_replicas: int) -> bool:
    """Returns whether every term of a loss is divided, as far as it is seen."""
    operation = tensor.op
    inputs = list(operation.inputs)
    if operation.type == "Const" or operation.type in _CALLS:
        return True
    if operation.type == "IdentityN":  # A tensor with a custom gradient.
        return _is_divided(inputs[tensor.value_index], num_replicas)
    if operation.type in _SUMS:
        return all(_is_divided(one, num_replicas) for one in inputs)
    if operation.type not in _PRODUCTS:
        # A sum may be divided by the global batch's size, which is right.
        return operation.type != "Mean"
    if operation.type == "Mul":
        factors, wanted = inputs, 1 / num_replicas
    else:
        factors, wanted = inputs[1:], num_replicas
    numbers = [tf.get_static_value(one) for one in factors]
    # Numbers of 16 bits are rounded.
    return any(
        one is not None and np.allclose(one, wanted, rtol=1e-2)
        for one in numbers
    ) or any(
        _is_divided(one, num_replicas)
        for one in inputs
        if one.op.type != "Const"
    )


def _returns_a_scalar(
    loss: keras.losses.Loss, y_true: Any, y_pred: Any
) -> bool:
    """Returns whether a loss is one number, without computing it."""
    try:
        shape = (
            tf.function(loss.call)
            .get_concrete_function(
                *tf.nest.map_structure(_spec, (y_true, y_pred))
            )
            .output_shapes
        )
    except Exception:  # The loss may need state that only the step has.
        return False
    return shape == tf.TensorShape([])


def _spec(value: Any) -> tf.TensorSpec:
    value = tf.convert_to_tensor(value)
    return tf.TensorSpec(value.shape, value.dtype)
