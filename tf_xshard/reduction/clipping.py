"""Defines serializable functions for `pre_reduce` and `post_reduce`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tf_xshard import checks
from tf_xshard.distribute import indexed_slices

GradientsAndVariables = Sequence[tuple]


def _ratio(norm: tf.Tensor, bound: float) -> tf.Tensor:
    """Returns a scalar that bounds a norm; nan keeps an overflow visible."""
    limit = tf.constant(bound, norm.dtype)
    ratio = limit / tf.maximum(norm, limit)
    return tf.where(tf.math.is_finite(norm), ratio, math.nan)


class _Clipping:
    """Clips (gradient, variable) pairs, and is serializable by Keras."""

    # AutoGraph converts users' hooks. These hooks do not need conversion.
    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads_and_vars: GradientsAndVariables) -> list[tuple]:
        """Clips a list of (gradient, variable) pairs."""
        present = [g for g, _ in grads_and_vars if g is not None]
        clip = self._clip_for(present)
        return [
            (indexed_slices.map_values(clip, gradient), variable)
            for gradient, variable in grads_and_vars
        ]

    def _clip_for(self, present: Sequence) -> Callable[[tf.Tensor], tf.Tensor]:
        """Returns a function that clips each of the gradients."""
        raise NotImplementedError

    def get_config(self) -> dict:
        """Returns the arguments, for serialization."""
        return dict(vars(self))

    @classmethod
    def from_config(cls, config: dict) -> _Clipping:
        """Creates a hook from the dict of `get_config`.

        Args:
          config: A dict of the arguments.
        """
        return cls(**config)


@keras.saving.register_keras_serializable("tf_xshard")
class clip_by_global_norm(_Clipping):
    """Scales all gradients together so that their joint L2 norm is bounded.

    As `pre_reduce`, it clips each replica's own gradients before the reduction,
    so that one replica's huge gradients can't drown the other replicas'. As
    `post_reduce`, it clips the reduced gradient, like `global_clipnorm` of the
    inner optimizer.

    Args:
      norm: The largest joint norm, a float > 0, in units of the gradient of a
        replica's own loss. (The division by the number of replicas is undone,
        and the loss scale is divided out.)

    Returns:
      A callable that takes and returns a list of (gradient, variable) pairs. If
      any gradient is not finite, all gradients become nan.

    Raises:
      TypeError: If `norm` is not a number.
      ValueError: If `norm` is not positive and finite.

    Example:

    >>> clip = tf_xshard.clip_by_global_norm(1.0)
    >>> [(gradient, _)] = clip([(tf.constant([3.0, 4.0]), None)])
    >>> [round(float(x), 3) for x in gradient]
    [0.6, 0.8]

    Source: Pascanu et al., "On the difficulty of training Recurrent Neural
    Networks", arXiv 1211.5063; `tf.clip_by_global_norm`.
    """

    def __init__(self, norm: float) -> None:
        self.norm = checks.positive_number(
            "clip_by_global_norm(norm=...)", norm
        )

    def _clip_for(self, present: Sequence) -> Callable[[tf.Tensor], tf.Tensor]:
        if not present:
            return tf.identity
        ratio = _ratio(tf.linalg.global_norm(present), self.norm)
        return lambda x: x * tf.cast(ratio, x.dtype)


@keras.saving.register_keras_serializable("tf_xshard")
class clip_by_norm(_Clipping):
    """Scales each gradient separately so that its L2 norm is bounded.

    Args:
      norm: The largest norm of one variable's gradient, a float > 0, in units
        of the gradient of a replica's own loss.

    Returns:
      A callable that takes and returns a list of (gradient, variable) pairs. A
      gradient that is not finite becomes nan.

    Raises:
      TypeError: If `norm` is not a number.
      ValueError: If `norm` is not positive and finite.

    Example:

    >>> clip = tf_xshard.clip_by_norm(1.0)
    >>> [(gradient, _)] = clip([(tf.constant([3.0, 4.0]), None)])
    >>> [round(float(x), 3) for x in gradient]
    [0.6, 0.8]

    Source: `tf.clip_by_norm`.
    """

    def __init__(self, norm: float) -> None:
        self.norm = checks.positive_number("clip_by_norm(norm=...)", norm)

    def _clip_for(self, present: Sequence) -> Callable[[tf.Tensor], tf.Tensor]:
        return lambda x: x * _ratio(tf.norm(x), self.norm)


@keras.saving.register_keras_serializable("tf_xshard")
class clip_by_value(_Clipping):
    """Bounds every element of every gradient.

    Args:
      low: The smallest element, a float, in units of the gradient of a
        replica's own loss.
      high: The largest element, a float > `low`.

    Returns:
      A callable that takes and returns a list of (gradient, variable) pairs.
      Elements that are not finite stay unchanged, which keeps an overflow
      visible. `tf.clip_by_value` would hide it.

    Raises:
      TypeError: If a bound is not a number.
      ValueError: If `low` is not below `high`, or a bound is not finite.

    Example:

    >>> clip = tf_xshard.clip_by_value(-1.0, 1.0)
    >>> [(gradient, _)] = clip([(tf.constant([-3.0, 0.5]), None)])
    >>> gradient.numpy().tolist()
    [-1.0, 0.5]

    Source: `tf.clip_by_value`.
    """

    def __init__(self, low: float, high: float) -> None:
        for name, value in (("low", low), ("high", high)):
            checks.number(f"clip_by_value({name}=...)", value)
        if not -math.inf < low < high < math.inf:
            raise ValueError(
                f"clip_by_value(low={low!r}, high={high!r}): low must be below"
                " high, and both finite."
            )
        self.low, self.high = float(low), float(high)

    def _clip_for(self, present: Sequence) -> Callable[[tf.Tensor], tf.Tensor]:
        def clip(x: tf.Tensor) -> tf.Tensor:
            clipped = tf.clip_by_value(x, self.low, self.high)
            return tf.where(tf.math.is_finite(x), clipped, x)

        return clip
