"""What every v1 wrapper hands on to the optimizer inside."""

from __future__ import annotations

import tensorflow as tf

from tf_xshard.compat.v1 import inner_optimizers


class Wrapper(tf.compat.v1.train.Optimizer):
    """Forwards slots, variables and checkpoints."""

    def _inner_here(self) -> inner_optimizers.V1 | inner_optimizers.Keras:
        """The adapter of the optimizer that is used where this is called."""
        raise NotImplementedError

    def _track(self, inner) -> None:
        """Lets a tf.train.Checkpoint find the inner optimizer."""
        self._track_trackable(inner.optimizer, "optimizer")

    def get_slot(self, *args, **kwargs):
        """Returns a slot of the inner optimizer.

        Args:
          *args: `var` and `name`, as the inner optimizer takes them.
          **kwargs: The same by name.

        Returns:
          The variable, or None if there is none yet.
        """
        return self._inner_here().get_slot(*args, **kwargs)

    def get_slot_names(self, *args, **kwargs) -> list[str]:
        """Returns the names of the inner optimizer's slots.

        Args:
          *args: None are documented.
          **kwargs: None are documented.

        Returns:
          A list.
        """
        return self._inner_here().get_slot_names(*args, **kwargs)

    def variables(self) -> list:
        """Returns the inner optimizer's variables.

        Returns:
          A list.
        """
        return self._inner_here().variables()

    def __dir__(self):
        # Checkpoint looks there for `get_slot_names`, to save slots. They are
        # the inner optimizer's and saved with it; a variable can't be the slot
        # of two.
        return [name for name in super().__dir__() if name != "get_slot_names"]

    def _create_or_restore_slot_variable(self, **kwargs):
        # A checkpoint of the originals has slots, but nothing else, here.
        self._inner_here().restore_slot(**kwargs)
