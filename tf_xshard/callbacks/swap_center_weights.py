"""Defines `SwapCenterWeights`, which validates and saves AGN's center."""

from __future__ import annotations

from typing import Any

import keras

from tf_xshard.optimizers import stack


class SwapCenterWeights(keras.callbacks.Callback):
    """Puts AGNOptimizer's center into the model for validation and saving.

    During training, the model holds each replica's local variables. This
    callback puts the center into the model while `fit` validates, and then
    restores the local variables. With `swap_on_epoch`, the model also holds the
    center between epochs, for later callbacks that save (`ModelCheckpoint`).
    `keras.callbacks.SwapEMAWeights` does the same with moving averages. Do not
    use both, since their swaps conflict.

    A file saved during a swap holds the center as the model's weights. If
    training resumes from this file with this callback, the callback restores
    the local variables first. Without this callback, the first step restores
    them only after it has computed its gradients.

    Args:
      swap_on_epoch: Whether the model holds the center between epochs. Place
        this callback before callbacks that save. Default: False.

    Raises:
      ValueError: When training begins, if the model's optimizer has no
        AGNOptimizer.

    Example:

    >>> model = keras.Sequential([keras.layers.Input((2,)),
    ...                           keras.layers.Dense(1)])
    >>> model.compile(tf_xshard.AGNOptimizer(keras.optimizers.SGD(0.1)), "mse")
    >>> history = model.fit(np.ones([8, 2]), np.ones([8, 1]), verbose=0,
    ...                     validation_data=(np.ones([8, 2]), np.ones([8, 1])),
    ...                     callbacks=[tf_xshard.SwapCenterWeights()])

    Source: `keras.callbacks.SwapEMAWeights`.
    """

    def __init__(self, swap_on_epoch: bool = False) -> None:
        super().__init__()
        self.swap_on_epoch = swap_on_epoch
        self._optimizers: list[Any] = []

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Finds the AGNOptimizer, or several in a MultiOptimizer.

        Args:
          logs: From Keras; not used.
        """
        del logs
        self._optimizers = [
            one
            for one in stack.descendants(self.model.optimizer)
            if hasattr(one, "show_center")
        ]
        if not self._optimizers:
            raise ValueError(
                "SwapCenterWeights needs a model that is compiled with an"
                f" AGNOptimizer, got {type(self.model.optimizer).__name__}."
            )

    def on_test_begin(self, logs: dict | None = None) -> None:
        """Puts the center into the model.

        Args:
          logs: From Keras; not used.
        """
        del logs
        self._show_centers(True)

    def on_test_end(self, logs: dict | None = None) -> None:
        """Puts the local variables back.

        Args:
          logs: From Keras; not used.
        """
        del logs
        self._show_centers(False)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Puts the center into the model if `swap_on_epoch` is set.

        Args:
          epoch: From Keras; not used.
          logs: From Keras; not used.
        """
        del epoch, logs
        if self.swap_on_epoch:
            self._show_centers(True)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Puts the local variables back.

        Args:
          epoch: From Keras; not used.
          logs: From Keras; not used.
        """
        del epoch, logs
        self._show_centers(False)

    def on_train_end(self, logs: dict | None = None) -> None:
        """Releases the optimizers; the model already holds the center.

        Args:
          logs: From Keras; not used.
        """
        del logs
        self._optimizers = []

    def _show_centers(self, shown: bool) -> None:
        for one in self._optimizers:
            one.show_center(shown)
