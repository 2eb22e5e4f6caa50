"""Defines the v1 wrappers' base class, and checks losses and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.compat.v1.optimizers import inner_optimizers
from tf_xshard.optimizers import commit
from tf_xshard.private.tensorflow import autograph
from tf_xshard.private.tensorflow import v1 as tensorflow_v1


def map_loss(function: Callable[[Any], Any], loss: Any) -> Any:
    """Applies a function to a loss, now or when a callable loss is called."""
    if callable(loss) and not tf.is_tensor(loss):
        computed = autograph.as_called_by_user(loss)
        return lambda: function(computed())
    inner_optimizers.check_loss(loss)
    return function(loss)


def pairs_of(grads_and_vars: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Lists the (gradient, variable) pairs of any iterable."""
    pairs = []
    for pair in grads_and_vars:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(
                "grads_and_vars must hold (gradient, variable) pairs, got"
                f" {pair!r}."
            )
        gradient, variable = pair
        pairs.append((gradient, variable))
    if not pairs:
        raise ValueError("No variables provided: grads_and_vars is empty.")
    return pairs


def tensors_of(
    grads_and_vars: Sequence[tuple[Any, Any]],
) -> list[tuple[Any, Any]]:
    """Converts gradients to tensors, except IndexedSlices and None."""

    def converted(gradient: Any) -> Any:
        if gradient is None or isinstance(gradient, tf.IndexedSlices):
            return gradient
        return tf.convert_to_tensor(gradient)

    return [(converted(g), v) for g, v in grads_and_vars]


class Wrapper(tensorflow_v1.WrapperBase):
    """Forwards slots, variables and checkpoints to a v1 optimizer."""

    def _inner_here(self) -> inner_optimizers.V1 | inner_optimizers.Keras:
        """Returns the inner optimizer's adapter, for the current shard."""
        raise NotImplementedError

    def _apply_inner(
        self,
        values: Iterable[Any],
        grads_and_vars: Sequence[tuple[Any, Any]],
        global_step: tf.Variable | None,
        **kwargs: Any,
    ) -> tf.Operation | None:
        """Applies gradients with the inner optimizer once `values` exist."""
        inner = self._inner_here()
        if isinstance(inner.optimizer, Wrapper):
            # It reduces first, and its own update waits for its reductions.
            values = []
        with commit.gate(values):
            return inner.apply(grads_and_vars, global_step, **kwargs)

    def _track(
        self, inner: inner_optimizers.V1 | inner_optimizers.Keras
    ) -> None:
        """Makes a tf.train.Checkpoint find the inner optimizer."""
        tensorflow_v1.track(self, inner.optimizer, "optimizer")

    def _restore_slot(self, **kwargs: Any) -> None:
        self._inner_here().restore_slot(**kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> tf.Variable | None:
        """Returns a slot variable of the inner optimizer.

        Args:
          *args: `var` and `name`, as the inner optimizer takes them.
          **kwargs: `var` and `name`, as keyword arguments.

        Returns:
          A variable, usually of `var`'s shape, or None if there is no slot.
        """
        return self._inner_here().get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> list[str]:
        """Lists the names of the inner optimizer's slots.

        Args:
          *args: Passed to the inner optimizer; none are documented.
          **kwargs: Passed to the inner optimizer; none are documented.

        Returns:
          A list of strings.
        """
        return self._inner_here().get_slot_names(*args, **kwargs)

    def variables(self) -> list[tf.Variable]:
        """Lists the inner optimizer's variables."""
        return self._inner_here().variables()
