"""The user's `pre_reduce` and `post_reduce`, called on unscaled gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.distribute import indexed_slices
from tf_xshard.private import tensorflow as private_tensorflow

GradientFunction = Callable[[list[tuple]], Sequence[tuple]]


def check(name: str, hook: Any) -> None:
    """Checks that an argument is a hook or None.

    Args:
      name: The argument's name.
      hook: What was given.

    Raises:
      TypeError: If it is neither.
    """
    if hook is not None and not callable(hook):
        raise TypeError(
            f"{name} must be a callable on a list of (gradient, variable)"
            f" pairs, got {hook!r}. See tf_xshard.clip_by_global_norm."
        )


def call(
    hook: GradientFunction | None,
    name: str,
    gradients: Sequence,
    variables: Sequence,
    *,
    scale_loss: Callable[[float], Any],
    multiplier: float = 1,
) -> list:
    """Calls a hook that may replace gradients, and scales its result back.

    The hook gets the gradients that are not None, times `multiplier` and
    divided by the loss scale, 16-bit gradients as float32.

    Args:
      hook: The function, or None to change nothing.
      name: Its argument's name, for errors.
      gradients: Tensors of the variables' shapes, IndexedSlices or None.
      variables: The variables.
      scale_loss: The optimizer's function that scaled the loss.
      multiplier: The factor that undoes the division of the loss.

    Returns:
      A list like `gradients`.

    Raises:
      ValueError: If the hook returns pairs for variables other than it got.
    """
    if hook is None:
        return list(gradients)
    loss_scale = scale_loss(1.0)

    def unscaled(values: tf.Tensor) -> tf.Tensor:
        if values.dtype.size < 4:
            values = tf.cast(values, tf.float32)
        return values * tf.cast(multiplier / loss_scale, values.dtype)

    def scaled_again(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        factor = tf.cast(loss_scale / multiplier, values.dtype)
        return tf.cast(values * factor, dtype)

    present = [i for i, g in enumerate(gradients) if g is not None]
    given = [
        (indexed_slices.map_values(unscaled, gradients[i]), variables[i])
        for i in present
    ]
    function = private_tensorflow.as_called_by_user(hook)
    returned = [tuple(pair) for pair in function(list(given))]
    if len(returned) != len(given) or any(
        len(pair) != 2 or pair[1] is not variable
        for pair, (_, variable) in zip(returned, given, strict=False)
    ):
        raise ValueError(
            f"{name} must return (gradient, variable) pairs for the"
            f" {len(given)} variables that it was given, in the same order; it"
            f" returned {len(returned)} that do not match."
        )
    result = list(gradients)
    for i, (gradient, _) in zip(present, returned, strict=True):
        dtype = gradients[i].dtype
        result[i] = indexed_slices.map_values(
            lambda values, dtype=dtype: scaled_again(values, dtype), gradient
        )
    return result
