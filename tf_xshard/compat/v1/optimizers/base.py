"""The v1 wrappers' base class, which forwards to the inner optimizer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_xshard.compat.v1.optimizers import inner_optimizers
from tf_xshard.private.tensorflow import v1 as tensorflow_v1


class Wrapper(tensorflow_v1.WrapperBase):
    """A v1 optimizer that forwards slots, variables and checkpoints."""

    def _inner_here(self) -> inner_optimizers.V1 | inner_optimizers.Keras:
        """Returns the inner optimizer's adapter, for the current shard."""
        raise NotImplementedError

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
