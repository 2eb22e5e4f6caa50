"""What every v1 wrapper forwards to the optimizer inside."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_xshard.compat.v1.optimizers import inner_optimizers
from tf_xshard.private.tensorflow import v1 as tensorflow_v1


class Wrapper(tensorflow_v1.WrapperBase):
    """Forwards slots, variables and checkpoints."""

    def _inner_here(self) -> inner_optimizers.V1 | inner_optimizers.Keras:
        """The adapter of the optimizer that is used where this is called."""
        raise NotImplementedError

    def _track(
        self, inner: inner_optimizers.V1 | inner_optimizers.Keras
    ) -> None:
        """Makes a tf.train.Checkpoint find the inner optimizer."""
        tensorflow_v1.track(self, inner.optimizer, "optimizer")

    def _restore_slot(self, **kwargs: Any) -> None:
        self._inner_here().restore_slot(**kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> tf.Variable | None:
        """Returns a slot of the inner optimizer.

        Args:
          *args: `var` and `name`, as the inner optimizer takes them.
          **kwargs: The same by name.

        Returns:
          A variable, usually of `var`'s shape, or None if there is none yet.
        """
        return self._inner_here().get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> list[str]:
        """Returns the names of the inner optimizer's slots.

        Args:
          *args: None are documented.
          **kwargs: None are documented.

        Returns:
          A list.
        """
        return self._inner_here().get_slot_names(*args, **kwargs)

    def variables(self) -> list[tf.Variable]:
        """Returns the inner optimizer's variables.

        Returns:
          A list.
        """
        return self._inner_here().variables()
