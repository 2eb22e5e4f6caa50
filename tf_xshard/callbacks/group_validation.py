"""Callbacks that validate and watch every group in `fit`."""

from __future__ import annotations

from typing import Any

import keras
from absl import logging

from tf_xshard.group_state import divergence
from tf_xshard.group_state import state

_ACTIONS = ("raise", "warn", "repair")
_NUM_SHOWN = 5


def check_count(name: str, value, *others) -> None:
    """Checks an argument that is a positive number of something.

    Args:
      name: The argument's name.
      value: What was given.
      *others: What it may be besides.

    Raises:
      ValueError: If it is neither.
    """
    if any(value is other or value == other for other in others):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        allowed = "".join(f" or {other!r}" for other in others)
        raise ValueError(
            f"{name} must be a positive int{allowed}, got {value!r}."
        )


class GroupValidation(keras.callbacks.Callback):
    """Adds each group's validation metrics to the logs of `fit`.

    `fit`'s own validation mixes the groups, each replica computing with its own
    weights. This adds `val_group_0_loss`, `val_group_1_loss` and so on, and
    `val_ensemble_loss`, for the loss and every metric, on the same whole data;
    callbacks behind it see them, and the history.

    Args:
      data: See `GroupState.evaluate`.
      every: A number of epochs. Default: 1.
      ensemble: Whether there are columns of the ensemble. Default: True.
      batch_size: See `keras.Model.evaluate`.
      steps: See `keras.Model.evaluate`.

    Raises:
      TypeError: If `data` is a generator.
      ValueError: If `every` is not a positive int.

    Example:

    >>> model = keras.Sequential([keras.layers.Input((2,)),
    ...                           keras.layers.Dense(1)])
    >>> model.compile(tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(0.1)),
    ...               "mse")
    >>> x, y = np.ones([8, 2]), np.ones([8, 1])
    >>> validation = tf_xshard.GroupValidation((x, y))
    >>> history = model.fit(x, y, verbose=0, callbacks=[validation])
    >>> list(history.history)
    ['loss', 'val_group_0_loss']

    Source: `validation_data` of `keras.Model.fit`, for every group.
    """

    def __init__(
        self,
        data: Any,
        every: int = 1,
        *,
        ensemble: bool = True,
        batch_size: int | None = None,
        steps: int | None = None,
    ):
        super().__init__()
        check_count("every", every)
        state.refuse_generator(data)
        self._data = data
        self._every = every
        self._options = {
            "ensemble": ensemble,
            "batch_size": batch_size,
            "steps": steps,
        }
        self._state = None

    def on_train_begin(self, logs=None):
        """Looks at the model.

        Args:
          logs: From Keras; not used.
        """
        del logs
        self._state = state.GroupState(self.model)

    def on_epoch_end(self, epoch, logs=None):
        """Adds the columns.

        Args:
          epoch: Index of the epoch.
          logs: From Keras; gets the columns.
        """
        if logs is None or (epoch + 1) % self._every:
            return
        for row in self._state.evaluate(self._data, **self._options):
            group = row.pop("group")
            name = group if group == "ensemble" else f"group_{group}"
            logs.update(
                {f"val_{name}_{metric}": value for metric, value in row.items()}
            )


class DivergenceSentinel(keras.callbacks.Callback):
    """Finds replicas of one group that differ and should not.

    A wrong collective, an operation that is not deterministic, or a bad restore
    lets replicas of one group drift apart, and nothing says so. This compares
    them when `fit` begins and every so many batches: trainable weights, slots
    and AGN's center, whose bits are equal. What is meant to differ (moving
    statistics, random states, what AGN trains between exchanges, open rounds of
    towers) it leaves alone.

    Args:
      every: A number of batches. A check reads all variables of all replicas.
        Default: 100.
      action: `"raise"` (default) a RuntimeError; `"warn"`, in the log; or
        `"repair"`: warn, and give all replicas of the group the value that most
        of them hold, of equally many the first one's.

    Raises:
      ValueError: If an argument has a wrong value.
      RuntimeError: In `fit`, with the variables, the replicas and the size of
        the difference.

    Example:

    >>> model = keras.Sequential([keras.layers.Input((2,)),
    ...                           keras.layers.Dense(1)])
    >>> model.compile(tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(0.1)),
    ...               "mse")
    >>> history = model.fit(np.ones([8, 2]), np.ones([8, 1]), verbose=0,
    ...                     callbacks=[tf_xshard.DivergenceSentinel(every=1)])

    Source: Keras makes mirrored variables with aggregation NONE, so an update
    that differs by replica goes unnoticed.
    """

    def __init__(self, every: int = 100, action: str = "raise"):
        super().__init__()
        check_count("every", every)
        if action not in _ACTIONS:
            raise ValueError(
                f"action must be one of {_ACTIONS}, got {action!r}."
            )
        self._every = every
        self._action = action
        self._num_since_check = 0
        self._state = None

    def on_train_begin(self, logs=None):
        """Checks what training begins with.

        Args:
          logs: From Keras; not used.
        """
        del logs
        self._state = state.GroupState(self.model)
        self._check("When training began")

    def on_train_batch_end(self, batch, logs=None):
        """Checks, if so many batches are through.

        Args:
          batch: Index of the last batch.
          logs: From Keras; not used.
        """
        del logs
        self._num_since_check += self.model.steps_per_execution
        if self._num_since_check >= self._every:
            self._check(f"After batch {batch}")

    def _check(self, when: str) -> None:
        self._num_since_check = 0
        if self._state.group_assignment.group_size == 1:
            return
        found = divergence.unequal(self._state, repair=self._action == "repair")
        if not found:
            return
        told = [
            f"{row['variable']!r} in group {row['group']}: replicas"
            f" {row['replicas']} by up to {row['largest_difference']:.3g}"
            for row in found[:_NUM_SHOWN]
        ]
        more = len(found) - len(told)
        text = (
            f"{when}, replicas of one group differ that should not:"
            f" {'; '.join(told)}{f'; and {more} more' if more else ''}."
        )
        if self._action == "raise":
            raise RuntimeError(
                f"{text} A restore or an assignment that did not reach all"
                " replicas, an operation that is not deterministic, or a wrong"
                ' collective does that. DivergenceSentinel(action="repair")'
                " makes them equal."
            )
        if self._action == "repair":
            text += " They have the value that most hold now."
        logging.warning("%s", text)
