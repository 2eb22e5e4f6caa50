"""Defines `LearningRateWarmup`, which raises the learning rate in `fit`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tf_xshard import checks
from tf_xshard import communication as communication_lib
from tf_xshard.group_state import replica_io
from tf_xshard.private.keras import fit_internals

# Rates are float32. A rate of the warm-up and a saved copy of it differ less.
_TOLERANCE = 1e-6


class LearningRateWarmup(keras.callbacks.Callback):
    """Raises the learning rate to its full value over the first epochs.

    N replicas allow a learning rate N times as high as one replica does, but
    not from the first step. The rate begins at `start * learning_rate` and
    grows linearly, batch by batch, to `learning_rate`. After the warm-up, this
    callback does not change the rate. If training resumes after the end of the
    warm-up, the rate is never changed.

    Rates may differ by group (`GroupState.assign`), or by optimizer of a
    MultiOptimizer. Each rate is then scaled by the same factor. The rates of
    the first batch in `fit` give the ratios, which are kept.

    Args:
      learning_rate: The learning rate after the warm-up, a positive float. If
        there are several rates, it is the largest one.
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
        self._replicas: Any = None
        # Each rate's variable, and its values on the local replicas after the
        # warm-up. None until the first batch of a `fit`.
        self._targets: list[tuple[Any, list[float]]] | None = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Checks that the learning rate can be set.

        Args:
          logs: From Keras; not used.
        """
        del logs
        for one in _leaves(self.model.optimizer):
            if not isinstance(one.learning_rate, keras.Variable):
                raise TypeError(
                    f"The learning rate of {one.name!r} is a schedule, which"
                    " LearningRateWarmup can't set. Compile the model with a"
                    " constant learning rate, or include the warm-up in the"
                    " schedule."
                )
        self._is_over = False
        self._targets = None
        self._replicas = replica_io.ReplicaValues(
            self.model.distribute_strategy,
            communication_lib.Communication(),
        )
        self._first = self._start
        if self._start is None:
            self._first = 1 / self._replicas.num_replicas

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
        # GroupCheckpoint may have restored a rate from after this batch.
        if not fit_internals.is_skipping(self.model):
            self._set_rates_after(self._num_before + batch)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Sets the next epoch's learning rate, for callbacks that save it.

        Args:
          epoch: The epoch's index.
          logs: From Keras; not used.
        """
        del logs
        self._set_rates_after((epoch + 1) * self._num_steps())

    def _set_rates_after(self, num_batches: int) -> None:
        if self._is_over:
            return
        # Other callbacks have restored or set the rates by the first batch.
        if self._targets is None and self._found_ended(num_batches):
            self._is_over = True
            return
        assert self._targets is not None
        factor = self._factor_after(num_batches)
        self._is_over = num_batches >= self._num_batches()
        for variable, targets in self._targets:
            self._replicas.assign(
                variable, [np.asarray(target * factor) for target in targets]
            )

    def _found_ended(self, num_batches: int) -> bool:
        """Reads the rates, and returns True if the warm-up is over."""
        variables = list(
            {
                id(one.learning_rate): one.learning_rate
                for one in _leaves(self.model.optimizer)
            }.values()
        )
        every = range(self._replicas.num_replicas)
        rates = list(self._replicas.gather(variables, every))
        largest = max(float(np.max(of)) for of in rates)
        self._targets = [
            (
                variable,
                [
                    self._rate * (float(of[r]) / largest if largest > 0 else 1)
                    for r in self._replicas.local_ids
                ],
            )
            for variable, of in zip(variables, rates, strict=True)
        ]
        end = self._num_batches()
        # A save may hold the rate of the last call before the end. With
        # `steps_per_execution`, a call takes several batches.
        last = range(max(0, num_batches - self.model.steps_per_execution), end)
        return num_batches >= end and not any(
            math.isclose(
                largest,
                self._rate * self._factor_after(before),
                rel_tol=_TOLERANCE,
            )
            for before in last
        )

    def _factor_after(self, num_batches: int) -> float:
        share = min(1.0, num_batches / (self._epochs * self._num_steps()))
        return self._first + (1 - self._first) * share

    def _num_batches(self) -> int:
        """Returns the number of batches that the warm-up takes."""
        return math.ceil(self._epochs * self._num_steps())

    def _num_steps(self) -> int:
        steps = self._steps or self.params.get("steps")
        if not steps:
            raise ValueError(
                "fit does not know how many batches an epoch has. Pass"
                " LearningRateWarmup(..., steps_per_epoch=...)."
            )
        return steps


def _leaves(optimizer: Any) -> Iterator[Any]:
    """Yields the optimizers that have a learning rate of their own."""
    several = getattr(optimizer, "optimizers", None)
    if not several:
        yield optimizer
        return
    for one in several:
        yield from _leaves(one)
