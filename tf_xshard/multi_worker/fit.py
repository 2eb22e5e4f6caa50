"""Makes Keras's `fit`, `evaluate` and callbacks work across processes."""

from __future__ import annotations

import contextlib
import dataclasses
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
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.multi_worker import local_cluster
from tf_xshard.optimizers import stack
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


# The calls that have not been undone, the latest last.
_active: list[MultiWorkerFit] = []


class MultiWorkerFit:
    """Undoes `multi_worker_fit`, by `undo` or as a context manager.

    Attributes:
      communication: The `Communication` of this call.
      restore_keras: Restores Keras's functions, whichever call replaced them.
    """

    def __init__(
        self,
        communication: communication_lib.Communication,
        restore_keras: Callable[[], None],
    ) -> None:
        self.communication = communication
        self.restore_keras = restore_keras

    def undo(self) -> None:
        """Undoes this call; the last call that is undone restores Keras.

        A second `undo` does nothing.
        """
        if self not in _active:
            return
        _active.remove(self)
        if not _active:
            self.restore_keras()

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

    Before the first batch, the workers compare how many batches they have. With
    a pipeline per worker (`strategy.distribute_datasets_from_function`), an
    epoch ends with the longest pipeline, and a worker without data takes part
    with empty batches. Other data must be the same on all workers.

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
        `connect`), or if another worker does not call `fit` in time.
      ValueError: When `fit`, `evaluate` or `predict` begins, if the workers
        have different arrays, datasets or numbers of steps. When `fit` begins,
        if their optimizers have made different numbers of steps.

    Example:

    >>> with tf_xshard.multi_worker_fit():
    ...     pass  # model.fit(...)

    Source: keras#20585.
    """
    if communication is None and _active:
        communication = _active[-1].communication
    # Metrics are summed in their own dtype, to keep counts exact.
    communication = (communication or communication_lib.Communication()).exact()
    restore_keras = (
        _active[-1].restore_keras
        if _active
        else multi_worker_patches.replace(
            _loop_of_worker,
            _mean_of_replicas,
            _agreed_count,
            site_lib.spans_processes,
        )
    )
    call = MultiWorkerFit(communication, restore_keras)
    _active.append(call)
    return call


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
        if loop.__name__ == "fit":
            _refuse_different_counts(self)
        if _is_shuffled(bound.arguments):
            seed = _take_the_chief_s_seed(self.distribute_strategy)
        if rank and bound.arguments["verbose"] == "auto":
            bound.arguments["verbose"] = 0
        callbacks = bound.arguments["callbacks"]
        watched = _Watched(self, seed)
        try:
            # `fit` passes its own callback list to `evaluate`.
            if isinstance(callbacks, keras.callbacks.CallbackList):
                return loop(*bound.args, **bound.kwargs)
            if isinstance(callbacks, keras.callbacks.Callback):
                callbacks = [callbacks]
            with of_worker(callbacks or (), rank) as own:
                # This order ends the batch before other callbacks run.
                bound.arguments["callbacks"] = [watched, *own]
                return loop(*bound.args, **bound.kwargs)
        finally:
            watched.batch.end()
            # `fit` may have failed before it called a callback.
            watched.on_train_begin()

    return loop_of_worker


def _refuse_different_counts(model: keras.Model) -> None:
    """Raises ValueError if the workers have made different numbers of steps."""
    counts = {}
    for one in stack.outermost_wrappers(getattr(model, "optimizer", None)):
        groups = [groups for _, groups in stack.StackPlan(one).reducing]
        has_one_group = all(g is None or g.num_groups == 1 for g in groups)
        for count in one.counts_of_stack() if one.built else ():
            # Groups may be at different steps.
            if count.is_common or has_one_group:
                [own, *_] = replica_variables.copies(count.variable)
                counts[count.name] = int(own)
    every = [
        json.loads(one)
        for one in _exchange(
            model.distribute_strategy, json.dumps(list(counts.values()))
        )
    ]
    if any(one != every[0] for one in every):
        raise ValueError(
            "The workers' optimizers have made different numbers of steps, so"
            " the workers would wait for each other or diverge. Nothing was"
            f" changed. Counts of {list(counts)}, by worker: {every}. Restore"
            " the same checkpoint on all workers."
        )


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
    seeds = [json.loads(one) for one in _exchange(strategy, json.dumps(own))]
    [chief, *_] = seeds
    if chief[0] is None or any(one[:2] != chief[:2] for one in seeds):
        tf.random.set_seed(chief[2] if chief[0] is None else chief[0])
    return before


def _agreed_count(
    strategy: tf.distribute.Strategy, own: multi_worker_patches.Batches
) -> int:
    """Returns the number of batches until no worker has data."""
    workers = [
        multi_worker_patches.Batches(**json.loads(one))
        for one in _exchange(strategy, json.dumps(dataclasses.asdict(own)))
    ]
    each = ", ".join(
        f"worker {rank} has {one.description}"
        for rank, one in enumerate(workers)
    )
    if len({one.steps for one in workers}) > 1:
        raise ValueError(
            "steps_per_epoch, validation_steps or steps differs between the"
            f" workers: {[one.steps for one in workers]}. Pass the same number"
            " on all workers."
        )
    if (
        not all(one.is_own_pipeline for one in workers)
        and len({one.description for one in workers}) > 1
    ):
        raise ValueError(
            "Each worker trains on its part of every batch, so the workers must"
            f" pass the same data, but {each}. Pass the same data on all"
            " workers. For a pipeline per worker, use"
            " strategy.distribute_datasets_from_function."
        )
    counts = [one.count for one in workers]
    # At each step, workers ask each other for the end of their pipelines. A
    # worker with an infinite pipeline does not ask.
    if len({one == tf.data.INFINITE_CARDINALITY for one in counts}) > 1:
        raise ValueError(
            f"Only some of the workers' pipelines are infinite: {each}. Call"
            " repeat() in the pipelines of all workers, or of none."
        )
    return min(counts) if min(counts) < 0 else max(counts)


def _exchange(strategy: tf.distribute.Strategy, text: str) -> list[str]:
    processes = process_gather.ProcessGather(
        strategy, _active[-1].communication, "fit, evaluate or predict"
    )
    return processes.exchange(text)


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
        communication = _active[-1].communication
        own = getattr(
            getattr(model, "optimizer", None), "communication", communication
        )
        self.batch = watchdog.WatchedBatch(
            max(own.timeout_seconds, communication.timeout_seconds)
        )

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Restores the seed, which the data pipeline has read by now.

        Args:
          logs: From Keras; not used.
        """
        del logs
        if self._seed is not None:
            self._seed.restore()
            self._seed = None

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
    communication = _active[-1].communication

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
