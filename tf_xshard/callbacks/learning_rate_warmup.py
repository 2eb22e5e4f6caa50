"""Defines `LearningRateWarmup`, which raises the learning rate in `fit`."""

from __future__ import annotations

from typing import Any

import keras

from tf_xshard import checks


class LearningRateWarmup(keras.callbacks.Callback):
    """Raises the learning rate to its full value over the first epochs.

    N replicas allow a learning rate N times as high as one replica does, but
    not from the first step. The rate begins at `start * learning_rate` and
    grows linearly, batch by batch, to `learning_rate`. After the warm-up, this
    callback does not change the rate.

    Args:
      learning_rate: The learning rate after the warm-up, a positive float.
      warmup_epochs: The length of the warm-up in epochs, a positive number.
        Default: 5.
      start: The first batch's fraction of `learning_rate`, from 0 to 1.
        Default: None, which means 1 / (number of replicas), the rate of one
        replica.
      steps_per_epoch: The number of batches in an epoch. Default: None, the
        number that `fit` knows. `fit` does not know it for a generator.

    Raises:
      TypeError: If an argument has the wrong type. When training begins, if the
        optimizer's learning rate is a schedule.
      ValueError: If an argument is invalid. When training begins, if the number
        of batches is unknown.

    Example:

    >>> model = keras.Sequential([keras.layers.Input((2,)),
    ...                           keras.layers.Dense(1)])
    >>> model.compile(tf_xshard.CrossShardOptimizer(keras.optimizers.SGD()),
    ...               "mse")
    >>> history = model.fit(
    ...     np.ones([8, 2]), np.ones([8, 1]), epochs=2, batch_size=2, verbose=0,
    ...     callbacks=[tf_xshard.LearningRateWarmup(0.8, 2, start=0.25)])
    >>> round(float(model.optimizer.learning_rate), 6)
    0.8

    Source: Goyal et al., "Accurate, Large Minibatch SGD", arXiv 1706.02677;
    `horovod.keras.callbacks.LearningRateWarmupCallback`, without its momentum
    correction.
    """

    def __init__(
        self,
        learning_rate: float,
        warmup_epochs: float = 5,
        start: float | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self._rate = checks.positive_number("learning_rate", learning_rate)
        self._epochs = checks.positive_number("warmup_epochs", warmup_epochs)
        if start is not None and not 0 <= checks.number("start", start) <= 1:
            raise ValueError(f"start must be from 0 to 1, got {start!r}.")
        self._start = start
        self._steps = checks.count("steps_per_epoch", steps_per_epoch, None)
        self._first: Any = start
        self._num_before = 0
        self._is_over = False

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Checks that the learning rate can be set.

        Args:
          logs: From Keras; not used.
        """
        del logs
        for one in self._optimizers():
            if not isinstance(one.learning_rate, keras.Variable):
                raise TypeError(
                    f"The learning rate of {one.name!r} is a schedule, which"
                    " LearningRateWarmup can't set. Compile the model with a"
                    " constant learning rate, or include the warm-up in the"
                    " schedule."
                )
        self._is_over = False
        self._first = self._start
        if self._start is None:
            strategy = self.model.distribute_strategy
            self._first = 1 / (strategy.num_replicas_in_sync if strategy else 1)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Computes the number of batches in the earlier epochs.

        Args:
          epoch: The epoch's index.
          logs: From Keras; not used.
        """
        del logs
        self._num_before = epoch * self._num_steps()

    def on_train_batch_begin(
        self, batch: int, logs: dict | None = None
    ) -> None:
        """Sets the batch's learning rate.

        Args:
          batch: The batch's index in the epoch.
          logs: From Keras; not used.
        """
        del logs
        self._set_rate_after(self._num_before + batch)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Sets the next epoch's learning rate, for callbacks that save it.

        Args:
          epoch: The epoch's index.
          logs: From Keras; not used.
        """
        del logs
        self._set_rate_after((epoch + 1) * self._num_steps())

    def _set_rate_after(self, num_batches: int) -> None:
        if self._is_over:
            return
        share = min(1.0, num_batches / (self._epochs * self._num_steps()))
        self._is_over = share == 1
        for one in self._optimizers():
            one.learning_rate = self._rate * (
                self._first + (1 - self._first) * share
            )

    def _optimizers(self) -> list[Any]:
        optimizer = self.model.optimizer
        return getattr(optimizer, "optimizers", None) or [optimizer]

    def _num_steps(self) -> int:
        steps = self._steps or self.params.get("steps")
        if not steps:
            raise ValueError(
                "fit does not know how many batches an epoch has. Pass"
                " LearningRateWarmup(..., steps_per_epoch=...)."
            )
        return steps
