"""Calls the functions that users pass to see and change gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.distribute import indexed_slices
from tf_xshard.private.tensorflow import autograph
from tf_xshard.reduction import gradients as gradients_lib

GradientFunction = Callable[[list[tuple]], Sequence[tuple]]


@dataclasses.dataclass(frozen=True)
class Hook:
    """Holds the `pre_reduce` or `post_reduce` argument of an optimizer."""

    # The argument's name, for errors.
    name: str
    # A function of a list of (gradient, variable) pairs. None changes nothing.
    function: GradientFunction | None

    def __post_init__(self) -> None:
        if self.function is not None and not callable(self.function):
            raise TypeError(
                f"{self.name} must be a callable on a list of (gradient,"
                f" variable) pairs, got {self.function!r}. See"
                " tf_xshard.clip_by_global_norm."
            )

    def __call__(
        self,
        batch: gradients_lib.GradientBatch,
        scale_loss: Callable[[float], Any],
    ) -> gradients_lib.GradientBatch:
        """Calls the function on unscaled gradients, and scales its results."""
        if self.function is None:
            return batch
        # The function gets the gradients that are present, times the batch's
        # factor and divided by the loss scale. 16-bit gradients become float32.
        as_dtype = gradients_lib.as_dtype
        loss_scale = scale_loss(1.0)

        def unscaled(values: tf.Tensor) -> tf.Tensor:
            if values.dtype.size < 4:
                values = tf.cast(values, tf.float32)
            return values * (batch.scale / as_dtype(loss_scale, values.dtype))

        def scaled_again(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
            factor = as_dtype(loss_scale, values.dtype) / batch.scale
            return tf.cast(values * factor, dtype)

        present = [i for i, g in enumerate(batch.values) if g is not None]
        given = [
            (
                indexed_slices.map_values(unscaled, batch.values[i]),
                batch.variables[i],
            )
            for i in present
        ]
        function = autograph.as_called_by_user(self.function)
        returned = [tuple(pair) for pair in function(list(given))]
        if len(returned) != len(given) or any(
            len(pair) != 2 or pair[1] is not variable
            for pair, (_, variable) in zip(returned, given, strict=False)
        ):
            raise ValueError(
                f"{self.name} must return (gradient, variable) pairs for the"
                f" {len(given)} variables that it was given, in the same order,"
                f" but it returned {len(returned)} pairs that do not match."
            )
        result = list(batch.values)
        # The function may return other IndexedSlices, with repeated indices.
        gradients = gradients_lib.standardized(
            [gradient for gradient, _ in returned],
            [variable for _, variable in given],
        )
        for i, gradient in zip(present, gradients, strict=True):
            dtype = batch.values[i].dtype
            result[i] = indexed_slices.map_values(
                lambda values, dtype=dtype: scaled_again(values, dtype),
                gradient,
            )
        return batch.with_values(result)
