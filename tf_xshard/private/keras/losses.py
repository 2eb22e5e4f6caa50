"""Evaluates Keras's losses with another reduction, and counts their items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_xshard.private import names

# `compile` converts the name of a loss, or a function, with `get_loss`. Present
# in Keras 3.12 to 3.16.
_KERAS = names.PrivateNames(
    "GlobalMean", {"get_loss": "keras.src.trainers.compile_utils.get_loss"}
)
# The mask of a tensor. Present in Keras 3.12 to 3.16.
_MASK, *_ = names.attributes("GlobalMean", "_keras_mask")


def resolved(loss: Any, y_true: Any = None, y_pred: Any = None) -> Any:
    """Converts a `loss` argument of `compile` to a `keras.losses.Loss`."""
    return _KERAS.get_loss(loss, y_true, y_pred)


class Evaluated(NamedTuple):
    """Holds the loss of one batch.

    Attributes:
      value: The loss, a scalar tensor.
      num_items: The number by which Keras divides the sum, a scalar tensor.
      num_rows: The number of rows, an int or a scalar tensor, if each row has
        the same number of items, that is, without masks and weights. Else None.
    """

    value: tf.Tensor
    num_items: tf.Tensor
    num_rows: Any


def evaluated(
    loss: keras.losses.Loss,
    reduction: str,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any,
) -> Evaluated:
    """Evaluates a loss with a reduction instead of its own."""
    found = []

    def call(y_true: Any, y_pred: Any) -> Any:
        found.append(loss.call(y_true, y_pred))
        return found[0]

    value = _variant(loss, reduction, call)(y_true, y_pred, sample_weight)
    if not found or tf.TensorShape(found[0].shape).rank == 0:
        raise ValueError(
            f"GlobalMean({loss.name}) needs a loss that returns a value for"
            " each row, but it returned one number, which does not show the"
            " number of rows. Return a value for each row, or use"
            " tf_xshard.ScalarLoss, which gives each replica the same weight."
        )
    [losses] = found
    weights = None
    if loss.reduction == "mean_with_sample_weight":
        weights = sample_weight
    # With losses of 1, the sum is the number of items. Masks still apply. On a
    # TPU, ones_like would also count the rows that pad a ragged batch.
    items = losses if weights is None else weights
    ones = tf.ones(keras.ops.shape(items), losses.dtype)
    mask = getattr(losses, _MASK, None)
    if mask is not None:
        setattr(ones, _MASK, mask)
    count = _variant(loss, "sum", lambda *_: ones)
    is_masked = mask is not None or any(
        getattr(one, _MASK, None) is not None for one in tf.nest.flatten(y_pred)
    )
    return Evaluated(
        _scalar(value),
        _scalar(count(y_true, y_pred, weights)),
        None
        if is_masked or weights is not None or None in losses.shape[1:]
        else losses.shape[0] or tf.shape(losses)[0],
    )


def _scalar(value: tf.Tensor) -> tf.Tensor:
    """Returns a scalar in at least float32, in which numbers are summed."""
    # Keras does not reduce a batch whose number of rows is known to be 0.
    value = tf.reduce_sum(value)
    return tf.cast(value, tf.float32) if value.dtype.size < 4 else value


def _variant(
    loss: keras.losses.Loss, reduction: str, call: Callable
) -> keras.losses.Loss:
    """Returns a copy with another reduction and another `call`."""
    # copy.copy would make Keras write the loss's config and create a new loss.
    result = object.__new__(type(loss))
    vars(result).update(vars(loss), reduction=reduction, call=call)
    return result
