"""Defines `CommunicationLedger`, which logs the measured communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import checks
from tf_xshard.collectives import counters
from tf_xshard.collectives import watchdog
from tf_xshard.distribute import site as site_lib
from tf_xshard.planning import communication_plan


class CommunicationLedger(keras.callbacks.Callback):
    """Adds the measured communication of each epoch to the logs of `fit`.

    The numbers are for one replica, averaged over this process's replicas:

    - `communication_collectives`: the number of collectives that ended;
    - `communication_bytes`: the bytes that a replica passed to collectives;
    - `communication_bytes_sent`: the bytes that a replica sent, computed for
      ring collectives (see `communication_plan`);
    - `communication_seconds`: the time from when a collective's input is ready
      until its result is ready. Collectives that overlap all count, so the sum
      may exceed the time that training waited. The value is 0 if one process
      runs all replicas eagerly, since nothing waits.

    With `skip_nonfinite=True`, the logs also get `skipped_steps`, the number of
    steps that were skipped in the epoch. With AGNOptimizer, they also get
    `skipped_local_steps`, the number of skipped local steps over all replicas.

    The callback counts each operation as it runs, including operations that run
    only sometimes (AGN's exchanges, rounds of towers, rows of an Embedding). It
    counts only tf_xshard's collectives, not Keras's reductions of metrics.
    Timing adds two operations per collective, so `fit` traces its step again. A
    step does not wait for these operations, and without this callback they do
    not exist. Later callbacks, such as `TensorBoard`, also see the numbers.

    On TPUs, a step is one program without counters. The callback then
    multiplies the plan's numbers by the number of steps that ran, and omits
    `communication_seconds`. It also omits them under
    `tf.config.experimental.enable_op_determinism`, which forbids clocks.

    Args:
      rows_per_step: See `communication_plan`. Used only on TPUs. Default: None.

    Raises:
      TypeError: If `rows_per_step` is not an int.
      ValueError: If `rows_per_step` is not positive.

    Attributes:
      totals: A dict from the names above to the sums over all epochs so far.

    Example:

    >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Input((3,)),
    ...                               keras.layers.Dense(2)])
    ...     model.compile(tf_xshard.CrossShardOptimizer(
    ...         keras.optimizers.SGD()), "mse")
    >>> ledger = tf_xshard.CommunicationLedger()
    >>> history = model.fit(np.ones([8, 3]), np.ones([8, 2]), batch_size=4,
    ...                     verbose=0, callbacks=[ledger])
    >>> history.history["communication_bytes"]
    [64.0]

    Source: Horovod's timeline and `NCCL_DEBUG`, as numbers.
    """

    def __init__(self, rows_per_step: int | None = None) -> None:
        super().__init__()
        if rows_per_step is not None:
            checks.positive_integer("rows_per_step", rows_per_step)
        self._rows_per_step = rows_per_step
        self._before = counters.Totals()
        self._skipped_before: dict[str, int] = {}
        self._num_steps = 0
        self._plan: Any = None
        self._has_clock = True
        self.totals: dict[str, float] = {}

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Prepares timing or, on TPUs, the communication plan.

        Args:
          logs: From Keras; not used.
        """
        del logs
        self._plan = None
        if isinstance(
            self.model.distribute_strategy, tf.distribute.TPUStrategy
        ):
            self._plan = communication_plan.communication_plan(
                self.model, rows_per_step=self._rows_per_step
            )
            return
        self._has_clock = _has_clock()
        if not self._has_clock:
            return
        # A train function that was traced earlier counts no seconds. Make a new
        # function, and keep the old one for the next `fit`.
        untimed = self.model.train_function
        untimed = getattr(untimed, "untimed", untimed)
        self.model.make_train_function(force=True)
        self.model.train_function = _timed(self.model, untimed)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Reads the counters.

        Args:
          epoch: Index of the epoch.
          logs: From Keras; not used.
        """
        del epoch, logs
        self._num_steps = 0
        self._before = self._counted()
        self._skipped_before = self._skipped()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Counts steps.

        Args:
          batch: Index of the last batch.
          logs: From Keras; not used.
        """
        del logs
        # The last execution of an epoch may have fewer steps than
        # steps_per_execution.
        self._num_steps = min(batch + 1, self.params.get("steps") or batch + 1)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Adds the numbers to the logs.

        Args:
          epoch: Index of the epoch.
          logs: From Keras; gets the numbers.
        """
        del epoch
        ran = {
            f"communication_{name}": float(after - before)
            for name, before, after in zip(
                ("collectives", "bytes", "bytes_sent", "seconds"),
                self._before,
                self._counted(),
                strict=True,
            )
        }
        if self._plan is not None or not self._has_clock:
            del ran["communication_seconds"]
        for name, after in self._skipped().items():
            ran[name] = float(after - self._skipped_before[name])
        for name, value in ran.items():
            self.totals[name] = self.totals.get(name, 0.0) + value
        if logs is not None:
            logs.update(ran)

    def on_train_end(self, logs: dict | None = None) -> None:
        """Removes timing from the model's next `fit`.

        Args:
          logs: From Keras; not used.
        """
        del logs
        function = self.model.train_function
        self.model.train_function = getattr(function, "untimed", function)

    def _skipped(self) -> dict[str, int]:
        """Returns the numbers of skipped steps; {} without skip_nonfinite."""
        optimizer = self.model.optimizer
        if not getattr(optimizer, "skip_nonfinite", False):
            return {}
        names = ("skipped_steps", "skipped_local_steps")
        return {
            name: getattr(optimizer, name)
            for name in names
            if hasattr(optimizer, name)
        }

    def _counted(self) -> counters.Totals:
        """Returns the totals of one replica so far."""
        if self._plan is not None:
            steps = self._num_steps
            return counters.Totals(
                self._plan.collectives_per_step * steps,
                self._plan.bytes_per_step * steps,
                self._plan.bytes_sent_per_step * steps,
            )
        strategy = self.model.distribute_strategy
        num_local = len(site_lib.local_replica_ids(strategy))
        totals = watchdog.WATCHDOG.totals()
        return counters.Totals(*(one / num_local for one in totals))


def _has_clock() -> bool:
    """Returns False if TensorFlow must be deterministic."""
    try:
        tf.timestamp()
    except tf.errors.FailedPreconditionError:
        return False
    return True


def _timed(model: keras.Model, untimed: Callable) -> Callable:
    """Wraps the model's train function to count seconds when it is traced."""
    made = model.train_function
    # The history is None if the list of callbacks keeps no history.
    history = getattr(model, "history", None)

    def train_function(iterator: Any) -> Any:
        # Each `fit` has its own history. An error ends a `fit` without calling
        # on_train_end.
        if getattr(model, "history", None) is not history:
            model.train_function = untimed
            return untimed(iterator)
        with counters.timing():
            return made(iterator)

    vars(train_function)["untimed"] = untimed
    return train_function
