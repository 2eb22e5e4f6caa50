"""Defines `GroupCheckpoint`, which saves every group in `fit` and resumes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_xshard import checks
from tf_xshard import group_assignment
from tf_xshard.callbacks import preemption as preemption_lib
from tf_xshard.distribute import lone_training
from tf_xshard.group_state import state
from tf_xshard.group_state.checkpoint import checkpoint
from tf_xshard.group_state.checkpoint import files
from tf_xshard.private.keras import fit_internals

_NAMES = re.compile(r"epoch-(\d{5,})-step-(\d{8,})/?")


class GroupCheckpoint(keras.callbacks.Callback):
    """Saves every group in `fit`, and resumes from the last save.

    It works like `keras.callbacks.BackupAndRestore`, but for all replicas. If
    the directory has a save when `fit` begins, the callback restores all state
    of every replica. Training then resumes at the next epoch and step. `fit`
    reads and skips the batches of this epoch that were already trained on. The
    data of an epoch must therefore come in the same order again, so seed the
    pipeline.

    A pipeline that continues from epoch to epoch (`dataset.repeat()` with
    `steps_per_epoch`) must start at the saved epoch. Use
    `dataset.skip(position.epoch * steps_per_epoch)`, with `position =
    GroupCheckpoint.position(directory)`.

    If the save comes from a finished run, `fit` trains only the remaining
    epochs. Metrics also resume in the middle of an epoch.

    The model must be built when `fit` begins, and so must all its optimizers
    except `model.optimizer`, such as the optimizers of a custom `train_step`.

    Args:
      directory: A path that all processes share. Each save is a subdirectory,
        which `GroupState.restore` can read.
      every: `"epoch"` (default), or a number of batches.
      keep: The number of latest saves to keep. None keeps all. Default: 1.
        Only files that GroupCheckpoint wrote are removed.
      regroup: See `GroupState.restore`. Used if the saved groups are different.
        Default: None.
      on_preemption: Whether to save and end when a process of the job gets
        SIGTERM or SIGUSR1. Slurm, Kubernetes and clouds send these signals
        before they take a machine away. All processes save after the same
        batch, or after validation, and end with SystemExit(143). About twice a
        second, after a batch, they check for such a signal. After a restart,
        training gives the same bits as without an interruption (on GPUs, only
        with `tf.config.experimental.enable_op_determinism`). Default: False.

    Raises:
      ValueError: If an argument is invalid. When `fit` begins, if the model or
        an optimizer is not built, or if the save is damaged, belongs to another
        model, or was made at a step that `steps_per_execution` does not divide.
      RuntimeError: When `fit` begins, in an evaluator or in one of several
        processes that would train alone (see `connect`). Also with
        `on_preemption`, if `fit` does not run in the main thread.
      SystemExit: In `fit`, with `on_preemption`, after a signal.
      TypeError: If `on_preemption` is not a bool.

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
        on_preemption: bool = False,
    ) -> None:
        super().__init__()
        self._directory = os.fspath(directory)
        self._every = checks.count("every", every, "epoch")
        self._keep = checks.count("keep", keep, None)
        self._regroup = regroup
        self._on_preemption = checks.boolean("on_preemption", on_preemption)
        self._preemption: preemption_lib.Preemption | None = None
        self._state: Any = None
        self._epoch = 0
        self._num_to_skip = 0
        self._num_since_save = 0
        self._restored_metrics: list[tuple] = []
        self._restored_from: str | None = None

    @staticmethod
    def position(
        directory: str | os.PathLike,
    ) -> checkpoint.Position | None:
        """Returns the position of training at the last save.

        Args:
          directory: The callback's directory.

        Returns:
          A `Position` with `epoch` and `step`, or None if there is no save.
          `step` is a multiple of `steps_per_execution`, so it can exceed the
          number of steps of the epoch.

        Raises:
          ValueError: If the last save is damaged.

        Example:

        >>> tf_xshard.GroupCheckpoint.position("/no/such/directory")
        """
        last = _last_save(os.fspath(directory))
        return checkpoint.position(last) if last else None

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Restores the last save.

        Args:
          logs: From Keras; not used.
        """
        del logs
        self._state = state.GroupState(self.model)
        lone_training.refuse(
            self._state.replicas.strategy, "GroupCheckpoint saves"
        )
        # Raise what `restore` would raise after a crash, hours later.
        self._state.catalog()
        self._num_to_skip = self._num_since_save = 0
        if self._on_preemption:
            self._preemption = preemption_lib.Preemption(
                self.model, self._state.replicas.gather_json
            )
            self._preemption.start()
        self._resume()

    def _resume(self) -> None:
        """Restores the last save, if there is one."""
        replicas = self._state.replicas
        # One process decides, since others may not see the last save yet.
        [last, *_] = replicas.gather_json(
            replicas.run_on_all_processes(
                f"Looking for saves in {self._directory!r}",
                lambda: self._state.is_chief and _last_save(self._directory),
            )
        )
        if not last:
            return
        position, saved_groups = replicas.run_on_all_processes(
            f"Reading {last!r}",
            lambda: (
                checkpoint.position(last),
                checkpoint.saved_groups(last),
            ),
        )
        steps = self.model.steps_per_execution
        if position.step % steps:
            raise ValueError(
                f"{last!r} was saved after {position.step} steps of an epoch,"
                f" but fit takes {steps} at once (steps_per_execution). Nothing"
                " was restored. Compile the model with a steps_per_execution"
                f" that divides {position.step}."
            )
        # Regroup only the first time, since later saves have the new groups.
        regroup = None
        if not group_assignment.same_groups(
            saved_groups, self._state.group_assignment
        ):
            regroup = self._regroup
        self._state.restore(last, regroup=regroup)
        self._restored_from = last if regroup is None else None
        logging.info("Restored %s: %s", last, position)
        fit_internals.start_at_epoch(self.model, position.epoch)
        self._num_to_skip = position.step
        self._restored_metrics = [
            (variable, replicas.local(variable))
            for variable in self.model.metrics_variables
        ]

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Skips batches that were already trained on, in the first epoch.

        Args:
          epoch: Index of the epoch.
          logs: From Keras; not used.
        """
        del logs
        self._epoch = epoch
        # `fit` has read the epoch to start at. Reset it, in case `fit` fails.
        fit_internals.start_at_epoch(self.model, None)
        if not self._num_to_skip:
            return
        # Keras has just reset the metrics, so restore them again.
        for variable, values in self._restored_metrics:
            self._state.replicas.assign(variable, values)
        fit_internals.skip_steps(
            self.model, self._num_to_skip, self._restore_new_metrics
        )

    def _restore_new_metrics(self) -> None:
        """Restores metrics that Keras created after `restore`."""
        if self._restored_from is not None:
            checkpoint.restore_metrics(
                self._state.catalog(),
                self._state.replicas,
                self._restored_from,
            )

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Saves if `every` batches have passed.

        Args:
          batch: Index of the last batch.
          logs: From Keras; not used.
        """
        del logs
        is_saved = batch < self._num_to_skip
        if not isinstance(self._every, str) and not is_saved:
            self._num_since_save += self.model.steps_per_execution
            if self._num_since_save >= self._every:
                self._save(self._epoch, batch + 1)
                is_saved = True
        self._end_if_asked(self._epoch, batch + 1, is_saved)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Saves if `every` is `"epoch"`.

        Args:
          epoch: Index of the epoch.
          logs: From Keras; not used.
        """
        del logs
        self._num_to_skip = 0
        if self._every == "epoch":
            self._save(epoch + 1, 0)
        # Validation may have taken long, so do not wait for the next check.
        self._end_if_asked(epoch + 1, 0, self._every == "epoch", at_once=True)

    def _end_if_asked(
        self, epoch: int, step: int, is_saved: bool, *, at_once: bool = False
    ) -> None:
        """Saves and ends this process if any process was asked to end."""
        if self._preemption is None:
            return
        if not self._preemption.is_asked(at_once=at_once):
            return
        if not is_saved:
            self._save(epoch, step)
        self._preemption.stop()
        logging.warning(
            "GroupCheckpoint: a signal asked a process of this job to end. All"
            " have saved epoch %d, step %d in %s, and end with exit code %d.",
            epoch,
            step,
            self._directory,
            preemption_lib.EXIT_CODE,
        )
        raise SystemExit(preemption_lib.EXIT_CODE)

    def on_train_end(self, logs: dict | None = None) -> None:
        """Resets state that would affect the model's next `fit`.

        Args:
          logs: From Keras; not used.
        """
        del logs
        fit_internals.start_at_epoch(self.model, None)
        if self._preemption is not None:
            self._preemption.stop()
            self._preemption = None
        self._state = None

    def _save(self, epoch: int, step: int) -> None:
        self._num_since_save = 0
        name = f"epoch-{epoch:05d}-step-{step:08d}"
        path = os.path.join(self._directory, name)
        self._state.save(path, epoch=epoch, step=step)
        keep = self._keep
        if keep is not None:
            self._state.replicas.run_on_all_processes(
                "Removing older saves",
                lambda: self._remove_all_but(path, keep),
            )

    def _remove_all_but(self, newest: str, keep: int) -> None:
        if not self._state.is_chief:
            return
        saves = _saves(self._directory)
        kept = {newest, *saves[-keep:]}
        for other in set(_all_saves(self._directory)) - kept:
            # An incomplete save may belong to another job, which completes it.
            files.remove(other, unless_saved=other not in saves)


def _all_saves(directory: str) -> list[str]:
    """Lists the paths of complete and incomplete saves, in training order."""
    if not tf.io.gfile.exists(directory):
        return []
    found = [
        (int(match[1]), int(match[2]), name.rstrip("/"))
        for name in tf.io.gfile.listdir(directory)
        if (match := _NAMES.fullmatch(name))
    ]
    return [os.path.join(directory, name) for *_, name in sorted(found)]


def _saves(directory: str) -> list[str]:
    return [one for one in _all_saves(directory) if files.has_save(one)]


def _last_save(directory: str) -> str | None:
    return next(reversed(_saves(directory)), None)
