"""Makes Keras's `fit`, `evaluate` and callbacks work across processes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import collectives
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.collectives import process_gather
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.collectives import watchdog
from tf_xshard.distribute import lone_training
from tf_xshard.distribute import site as site_lib
from tf_xshard.multi_worker import local_cluster
from tf_xshard.private.keras import fit_internals
from tf_xshard.private.keras import multi_worker_patches
from tf_xshard.private.tensorflow import runtime
from tf_xshard.reduction import buckets

_CHIEF_ONLY = (
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


@contextlib.contextmanager
def of_worker(
    callbacks: Sequence[keras.callbacks.Callback], rank: int
) -> Iterator[Sequence[keras.callbacks.Callback]]:
    """Yields a worker's callbacks, which write none of the chief's files."""
    if rank == 0:
        yield callbacks
        return
    own: list[keras.callbacks.Callback] = []
    changed: list[tuple[keras.callbacks.ModelCheckpoint, str]] = []
    with tempfile.TemporaryDirectory() as directory:
        for one in callbacks:
            # A callback that was written for tf.keras may have an attribute
            # for "only on the chief". Keras 3 has no such attribute.
            if isinstance(
                one, _CHIEF_ONLY
            ) or fit_internals.is_for_the_chief_only(one):
                continue
            if type(one) is keras.callbacks.BackupAndRestore:
                one = keras.callbacks.BackupAndRestore(
                    f"{os.fspath(one.backup_dir).rstrip('/')}_worker_{rank}",
                    one.save_freq,
                    one.double_checkpoint,
                    one.delete_checkpoint,
                )
            if isinstance(one, keras.callbacks.ModelCheckpoint):
                changed.append((one, one.filepath))
                one.filepath = os.path.join(
                    directory, os.path.basename(one.filepath)
                )
            own.append(one)
        try:
            yield own
        finally:
            for one, filepath in changed:
                one.filepath = filepath


# The `Communication` of every call that has not been undone.
_active: list[communication_lib.Communication] = []


class MultiWorkerFit:
    """Undoes `multi_worker_fit`, by `undo` or as a context manager."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def undo(self) -> None:
        """Restores Keras. A second call does nothing."""
        undo, self._undo = self._undo, lambda: None
        undo()

    def __enter__(self) -> MultiWorkerFit:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


def multi_worker_fit(
    communication: communication_lib.Communication | None = None,
) -> MultiWorkerFit:
    """Makes Keras's training loops work across several processes.

    Under MultiWorkerMirroredStrategy with several processes, `fit` and
    `evaluate` of Keras 3.12 to 3.16 fail in two places. This function replaces
    both until `undo` is called or the `with` block ends. Metrics then cover all
    workers, and the last batch need not divide evenly between workers. Nothing
    changes for other strategies. If Keras has fixed a place, this function
    leaves it unchanged, and the log says so.

    Workers other than the chief print nothing unless `verbose` is given, and
    skip `CSVLogger`, `TensorBoard` and `RemoteMonitor`. They write the files of
    `ModelCheckpoint` to a temporary directory, since reading a variable can be
    a collective of all workers. `BackupAndRestore` gets a separate directory on
    each of these workers, ending in `_worker_1` and so on. A crash between two
    workers' writes leaves the workers at different epochs. `GroupCheckpoint`
    never does.

    If `fit` shuffles arrays, and the processes have different seeds or none,
    all processes use the chief's seed. Each row is then trained on once per
    epoch.

    A batch that waits longer than the timeout for data or for a hanging worker
    ends with an error, as a collective does. `communication` and the optimizer
    each have a timeout, and the longer timeout applies.

    Args:
      communication: A `Communication` for summing metrics at each step, each
        in its own dtype (integers in float32). Its timeout applies to the
        metrics and to a batch. Default: None, the enclosing call's
        `communication`, or else `Communication()`.

    Returns:
      A `MultiWorkerFit`, which is a context manager and has `undo()`.

    Raises:
      RuntimeError: If this version of Keras has changed these places in an
        unknown way, or if their source can't be read. When `fit` begins, if
        several processes were started and this process would train alone (see
        `connect`).

    Example:

    >>> with tf_xshard.multi_worker_fit():
    ...     pass  # model.fit(...)

    Source: keras#20585.
    """
    if communication is None and _active:
        communication = _active[-1]
    # Metrics are summed in their own dtype, to keep counts exact.
    communication = (communication or communication_lib.Communication()).exact()
    undo = (
        multi_worker_patches.replace(
            _loop_of_worker, _mean_of_replicas, site_lib.spans_processes
        )
        if not _active
        else lambda: None
    )
    _active.append(communication)

    def leave() -> None:
        _active.remove(communication)
        undo()

    return MultiWorkerFit(leave)


def _loop_of_worker(loop: Callable) -> Callable:
    """Wraps `fit`, `evaluate` or `predict` for one of several processes."""
    signature = inspect.signature(loop)

    @functools.wraps(loop)
    def loop_of_worker(self: Any, *args: Any, **kwargs: Any) -> Any:
        rank = _rank(self.distribute_strategy)
        if rank is None:
            if loop.__name__ == "fit":
                lone_training.refuse(
                    self.distribute_strategy, "multi_worker_fit trains"
                )
            return loop(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        seed = None
        if _is_shuffled(bound.arguments):
            seed = _take_the_chief_s_seed(self.distribute_strategy)
        if rank and bound.arguments["verbose"] == "auto":
            bound.arguments["verbose"] = 0
        callbacks = bound.arguments["callbacks"]
        # `fit` passes its own callback list to `evaluate`.
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return loop(*bound.args, **bound.kwargs)
        if isinstance(callbacks, keras.callbacks.Callback):
            callbacks = [callbacks]
        watched = _Watched(self, seed)
        with of_worker(callbacks or (), rank) as own:
            # This order ends the batch before other callbacks run.
            bound.arguments["callbacks"] = [watched, *own]
            try:
                return loop(*bound.args, **bound.kwargs)
            finally:
                watched.batch.end()

    return loop_of_worker


def _is_shuffled(arguments: dict[str, Any]) -> bool:
    """Returns whether Keras shuffles arrays for this call."""
    arrays = keras.tree.flatten(arguments["x"])[:1]
    return bool(arguments.get("shuffle")) and all(
        hasattr(one, "shape") for one in arrays
    )


def _take_the_chief_s_seed(
    strategy: tf.distribute.Strategy,
) -> runtime.GlobalSeed:
    """Makes all processes shuffle identically; returns the seed to restore."""
    # Keras shuffles by TensorFlow's global seed. Each process trains on its own
    # part of every batch, so different orders repeat rows and leave out others.
    before = runtime.GlobalSeed()
    own = [before.seed, before.next_seed(), secrets.randbits(31)]
    processes = process_gather.ProcessGather(
        strategy, _active[-1], "fit or evaluate"
    )
    seeds = [
        json.loads(one) for one in processes.gather(json.dumps(own).encode())
    ]
    [chief, *_] = seeds
    if chief[0] is None or any(one[:2] != chief[:2] for one in seeds):
        tf.random.set_seed(chief[2] if chief[0] is None else chief[0])
    return before


def _rank(strategy: tf.distribute.Strategy) -> int | None:
    """Returns this process's rank, or None if there is only one process."""
    if not site_lib.spans_processes(strategy):
        return None
    return site_lib.rank(strategy)


class _Watched(keras.callbacks.Callback):
    """Limits how long a batch waits for data or for another worker."""

    def __init__(
        self, model: keras.Model, seed: runtime.GlobalSeed | None
    ) -> None:
        super().__init__()
        self._seed = seed
        own = getattr(
            getattr(model, "optimizer", None), "communication", _active[-1]
        )
        self.batch = watchdog.WatchedBatch(
            max(own.timeout_seconds, _active[-1].timeout_seconds)
        )

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Restores the seed, which the data pipeline has read by now.

        Args:
          logs: From Keras; not used.
        """
        del logs
        if self._seed is not None:
            self._seed.restore()

    def _begin(self, batch: int = 0, **_: Any) -> None:
        if not batch:
            # TensorFlow has just made the data's iterator, which resets these
            # settings.
            local_cluster.keep_freed_memory()
        self.batch.begin()

    def _end(self, *_: Any, **__: Any) -> None:
        self.batch.end()

    on_train_batch_begin = on_test_batch_begin = on_predict_batch_begin = _begin
    on_train_batch_end = on_test_batch_end = on_predict_batch_end = _end
    # The data may end after a batch has begun.
    on_epoch_end = on_test_end = on_predict_end = _end


def _mean_of_replicas(values: Any, strategy: tf.distribute.Strategy) -> Any:
    """Averages over all replicas the values that a step returned."""
    communication = _active[-1]

    def on_replica(parts: list) -> list[tf.Tensor]:
        site = site_lib.current()
        every = group_assignment_lib.GroupAssignment.single(site.num_replicas)
        transport = collectives.transport_for(
            site, transport_lib.Channel(every, communication)
        )
        parts = [
            part if part.dtype.is_floating else tf.cast(part, tf.float32)
            for part in map(tf.convert_to_tensor, parts)
        ]
        sums = buckets.sum_dense(parts, transport).values
        return [total / site.num_replicas for total in sums]

    means = strategy.run(on_replica, (keras.tree.flatten(values),))
    return keras.tree.pack_sequence_as(
        values, [strategy.experimental_local_results(one)[0] for one in means]
    )
