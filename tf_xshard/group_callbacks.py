"""Callbacks that save, validate and watch every group in `fit`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_xshard import group_divergence
from tf_xshard import group_saving
from tf_xshard import group_state
from tf_xshard import keras_trainer
from tf_xshard import saved_state

_NAMES = re.compile(r"epoch-(\d{5,})-step-(\d{8,})/?")
_ACTIONS = ("raise", "warn", "repair")
_NUM_SHOWN = 5


def _check_count(name: str, value, *others) -> None:
    if any(value is other or value == other for other in others):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        allowed = "".join(f" or {other!r}" for other in others)
        raise ValueError(
            f"{name} must be a positive int{allowed}, got {value!r}."
        )


class GroupCheckpoint(keras.callbacks.Callback):
    """Saves every group in `fit`, and goes on where training ended.

    As `keras.callbacks.BackupAndRestore`, for all replicas: when `fit` begins
    and the directory has a save, all state of every replica is restored, and
    training goes on with the epoch and the step behind it. The batches of that
    epoch that were trained on are read and skipped.

    So the data of an epoch have to come in the same order again: seed them. A
    pipeline that goes on from epoch to epoch (`dataset.repeat()` with
    `steps_per_epoch`) has to start at the saved epoch:
    `dataset.skip(position.epoch * steps_per_epoch)`, with `position =
    GroupCheckpoint.position(directory)`.

    A `fit` that finds a finished run's save trains only epochs that are left.

    Args:
      directory: Where; each save is a directory in it, which
        `GroupState.restore` reads. With several processes all must see it.
      every: `"epoch"` (default), or a number of batches.
      keep: How many saves to keep, the last ones. None for all. Default: 1.
      regroup: See `GroupState.restore`; used where the saved groups are others.
        Default: None.

    Raises:
      ValueError: If an argument has a wrong value; when `fit` begins, if the
        save is damaged or of another model.

    Example:

    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> model = keras.Sequential([keras.layers.Input((2,)),
    ...                           keras.layers.Dense(1)])
    >>> model.compile(tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(0.1)),
    ...               "mse")
    >>> def train(epochs):
    ...     history = model.fit(
    ...         np.ones([8, 2]), np.ones([8, 1]), epochs=epochs, verbose=0,
    ...         callbacks=[tf_xshard.GroupCheckpoint(directory)])
    ...     return history.epoch
    >>> train(2), train(5)
    ([0, 1], [2, 3, 4])

    Source: `keras.callbacks.BackupAndRestore`.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        every: str | int = "epoch",
        keep: int | None = 1,
        *,
        regroup: str | Mapping[int, int] | None = None,
    ):
        super().__init__()
        _check_count("every", every, "epoch")
        _check_count("keep", keep, None)
        self._directory = os.fspath(directory)
        self._every = every
        self._keep = keep
        self._regroup = regroup
        self._state = None
        self._epoch = 0
        self._num_to_skip = 0
        self._num_since_save = 0
        self._metrics = []

    @staticmethod
    def position(
        directory: str | os.PathLike,
    ) -> group_saving.Position | None:
        """How far training was at the last save.

        Args:
          directory: The callback's directory.

        Returns:
          A `Position` with `epoch` and `step`, or None if there is no save.

        Example:

        >>> tf_xshard.GroupCheckpoint.position("/no/such/directory")
        """
        last = _last_save(os.fspath(directory))
        return last and group_saving.position(last)

    def on_train_begin(self, logs=None):
        """Restores the last save.

        Args:
          logs: From Keras; not used.
        """
        del logs
        self._state = group_state.GroupState(self.model)
        self._num_to_skip = self._num_since_save = 0
        # One process decides, should others not see the directory's last state.
        [last, *_] = self._state.replicas.gather_json(
            _last_save(self._directory)
        )
        if last is None:
            return
        position = group_saving.position(last)
        steps = self.model.steps_per_execution
        if position.step % steps:
            raise ValueError(
                f"{last!r} was saved after {position.step} steps of an epoch,"
                f" and fit takes {steps} at once (steps_per_execution). Go on"
                " with a number that divides it."
            )
        # Only the first time: what was regrouped has been saved with the new
        # groups since.
        regroup = None
        if group_saving.saved_groups(last) != self._state.group_assignment:
            regroup = self._regroup
        self._state.restore(last, regroup=regroup)
        logging.info("Restored %s: %s", last, position)
        keras_trainer.start_at_epoch(self.model, position.epoch)
        self._num_to_skip = position.step
        self._metrics = [
            (variable, self._state.replicas.local(variable))
            for variable in self.model.metrics_variables
        ]

    def on_epoch_begin(self, epoch, logs=None):
        """Skips what has been trained on, in the first epoch.

        Args:
          epoch: Index of the epoch.
          logs: From Keras; not used.
        """
        del logs
        self._epoch = epoch
        # `fit` has read it; one that ends in an error must not leave it behind.
        keras_trainer.start_at_epoch(self.model, None)
        if not self._num_to_skip:
            return
        # Keras has just reset them.
        for variable, values in self._metrics:
            self._state.replicas.assign(variable, values)
        keras_trainer.skip_steps(self.model, self._num_to_skip)

    def on_train_batch_end(self, batch, logs=None):
        """Saves, if so many batches are through.

        Args:
          batch: Index of the last batch.
          logs: From Keras; not used.
        """
        del logs
        if self._every == "epoch" or batch < self._num_to_skip:
            return
        self._num_since_save += self.model.steps_per_execution
        if self._num_since_save >= self._every:
            self._save(self._epoch, batch + 1)

    def on_epoch_end(self, epoch, logs=None):
        """Saves, if that is asked for.

        Args:
          epoch: Index of the epoch.
          logs: From Keras; not used.
        """
        del logs
        self._num_to_skip = 0
        if self._every == "epoch":
            self._save(epoch + 1, 0)

    def on_train_end(self, logs=None):
        """Leaves the model's next `fit` to itself.

        Args:
          logs: From Keras; not used.
        """
        del logs
        keras_trainer.start_at_epoch(self.model, None)
        self._state = None

    def _save(self, epoch: int, step: int) -> None:
        self._num_since_save = 0
        name = f"epoch-{epoch:05d}-step-{step:08d}"
        path = os.path.join(self._directory, name)
        self._state.save(path, epoch=epoch, step=step)
        if self._keep is not None and self._state.is_chief:
            complete = _saves(self._directory)
            kept = {path, *complete[-self._keep :]}
            for other in set(_all_saves(self._directory)) - kept:
                saved_state.remove(other)


def _all_saves(directory: str) -> list[str]:
    """Paths of saves, those not completed included, in order of training."""
    if not tf.io.gfile.exists(directory):
        return []
    found = [
        (int(match[1]), int(match[2]), name.rstrip("/"))
        for name in tf.io.gfile.listdir(directory)
        if (match := _NAMES.fullmatch(name))
    ]
    return [os.path.join(directory, name) for *_, name in sorted(found)]


def _saves(directory: str) -> list[str]:
    return [one for one in _all_saves(directory) if saved_state.has_save(one)]


def _last_save(directory: str) -> str | None:
    return next(reversed(_saves(directory)), None)


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
        _check_count("every", every)
        group_state.refuse_generator(data)
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
        self._state = group_state.GroupState(self.model)

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
        _check_count("every", every)
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
        self._state = group_state.GroupState(self.model)
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
        found = group_divergence.unequal(
            self._state, repair=self._action == "repair"
        )
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
