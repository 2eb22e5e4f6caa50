"""Keras' `fit`, `evaluate` and `predict` over several processes.

A door to names that Keras does not export, as `inner_update` is.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Callable

import keras
import tensorflow as tf
from absl import logging
from keras.src.backend.tensorflow import trainer as _trainer

from tf_xshard import chief_callbacks
from tf_xshard import communication as communication_lib
from tf_xshard import cross_shard_optimizer
from tf_xshard import reduction
from tf_xshard import replica_context
from tf_xshard import transports
from tf_xshard import versions
from tf_xshard.transports import watchdog

# Keras' private names, each with the reason. Seen in 3.12 to 3.15.
KERAS_PRIVATE_NAMES = (
    # Takes the mean of a tuple of PerReplica values, which
    # MultiWorkerMirroredStrategy refuses (keras#20585).
    (_trainer.TensorFlowTrainer, "_maybe_symbolic_build"),
    # Reduces scalars over their dimension 0, which they do not have.
    (_trainer, "reduce_per_replica"),
    # What follows the first, which is right.
    (_trainer.TensorFlowTrainer, "_symbolic_build"),
)
versions.check_names(KERAS_PRIVATE_NAMES)

# Sources that are known to be wrong, by their SHA-256: Keras 3.12 to 3.15.
_KNOWN_WRONG = {
    "_maybe_symbolic_build": "92a504f5eba9b29f",
    "reduce_per_replica": "2e7d54b1e6edc29a",
}
# The calls in them that are wrong. A source without them is another one.
_WRONG_CALLS = {
    "_maybe_symbolic_build": "distribute_strategy.reduce(",
    "reduce_per_replica": 'strategy.reduce("MEAN", v, axis=0)',
}
# The communication of every call that has not been undone.
_active = []


def _state_of(name: str, function) -> str:
    """`"wrong"`, `"right"` or `"unknown"`."""
    source = inspect.getsource(function)
    digest = hashlib.sha256(source.encode()).hexdigest()
    if digest.startswith(_KNOWN_WRONG[name]):
        return "wrong"
    return "unknown" if _WRONG_CALLS[name] in source else "right"


class MultiWorkerFit:
    """What `multi_worker_fit` returns: a context manager, and `undo`."""

    def __init__(self, undo: Callable[[], None]):
        self._undo = undo

    def undo(self) -> None:
        """Makes Keras what it was. A second call does nothing."""
        undo, self._undo = self._undo, lambda: None
        undo()

    def __enter__(self) -> MultiWorkerFit:
        return self

    def __exit__(self, *exception) -> None:
        self.undo()


def multi_worker_fit(
    communication: communication_lib.Communication | None = None,
) -> MultiWorkerFit:
    """Makes Keras' training loops work over several processes.

    Under MultiWorkerMirroredStrategy with several processes `fit` and
    `evaluate` of Keras 3.12 to 3.15 fail in two places, which this replaces
    until `undo` is called, or the `with` block ends. Then metrics are over all
    workers, and a last batch may be one that they can't share evenly. Nothing
    changes for other strategies. A place that Keras has mended stays as it is,
    and the log says so.

    Workers other than the chief print nothing, unless `verbose` is given, leave
    out `CSVLogger`, `TensorBoard` and `RemoteMonitor`, and write what
    `ModelCheckpoint` saves into a temporary directory (all have to take part,
    since reading a variable can be a collective). `BackupAndRestore` has a
    directory for each of them, with `_worker_1` and so on at the end; a crash
    between two workers' writes leaves them different epochs, which
    `GroupCheckpoint` never does.

    A batch that waits for data, or for another worker that hangs, longer than
    the timeout (this one or the optimizer's, the longer) ends with an error, as
    a collective does.

    Args:
      communication: How metrics travel at each step, in float32 at least; its
        timeout holds for them and for a batch. None (default) for the
        enclosing call's, else `Communication()`.

    Returns:
      A `MultiWorkerFit`, which is a context manager and has `undo()`.

    Raises:
      RuntimeError: If this Keras has changed these places in a way that is not
        known, so that nothing can be said about them; if their source can't be
        read.

    Example:

    >>> with tf_xshard.multi_worker_fit():
    ...     pass  # model.fit(...)

    Source: keras#20585.
    """
    if communication is None and _active:
        communication = _active[-1]
    # Metrics travel in their own type, which has to count exactly.
    communication = dataclasses.replace(
        communication or communication_lib.Communication(), dtype=None
    )
    undo = _replace_all() if not _active else lambda: None
    _active.append(communication)

    def leave():
        _active.remove(communication)
        undo()

    return MultiWorkerFit(leave)


def _replace_all() -> Callable[[], None]:
    """Replaces what is wrong, and returns what undoes it."""
    places = {
        "_maybe_symbolic_build": (
            _trainer.TensorFlowTrainer,
            _maybe_symbolic_build,
        ),
        "reduce_per_replica": (_trainer, _reduce_per_replica),
    }
    originals = {
        name: getattr(owner, name) for name, (owner, _) in places.items()
    }
    try:
        states = {name: _state_of(name, one) for name, one in originals.items()}
    except OSError as error:
        states = {"source": f"unknown ({error})"}
    if any(state.startswith("unknown") for state in states.values()):
        raise RuntimeError(
            "tf_xshard.multi_worker_fit() can't tell whether fit works over"
            f" several processes in Keras {keras.__version__}: {states}. It is"
            f" known of Keras {versions.KERAS[0]} to {versions.KERAS[1]}; leave"
            " the call out to see."
        )
    wrong = [name for name, state in states.items() if state == "wrong"]
    for name in set(states) - set(wrong):
        logging.warning(
            "Keras %s has changed %s, and the call that was wrong is gone from"
            " it: multi_worker_fit() leaves it as it is.",
            keras.__version__,
            name,
        )
    for name in wrong:
        owner, make = places[name]
        setattr(owner, name, make(originals[name]))
    loops = {
        name: getattr(_trainer.TensorFlowTrainer, name)
        for name in ("fit", "evaluate", "predict")
    }
    for name, loop in loops.items():
        setattr(_trainer.TensorFlowTrainer, name, _loop_of_worker(loop))

    def undo():
        for name in wrong:
            setattr(places[name][0], name, originals[name])
        for name, loop in loops.items():
            setattr(_trainer.TensorFlowTrainer, name, loop)

    return undo


def _loop_of_worker(loop: Callable) -> Callable:
    """`fit`, `evaluate` or `predict`, for one of several processes."""
    signature = inspect.signature(loop)

    @functools.wraps(loop)
    def loop_of_worker(self, *args, **kwargs):
        rank = _rank(self.distribute_strategy)
        if rank is None:
            return loop(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        if rank and bound.arguments["verbose"] == "auto":
            bound.arguments["verbose"] = 0
        callbacks = bound.arguments["callbacks"]
        # `fit` gives `evaluate` its own.
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return loop(*bound.args, **bound.kwargs)
        if isinstance(callbacks, keras.callbacks.Callback):
            callbacks = [callbacks]
        watched = _Watched(self)
        with chief_callbacks.of_worker(callbacks or (), rank) as own:
            # First, so that what others do at an end is not in the batch.
            bound.arguments["callbacks"] = [watched, *own]
            try:
                return loop(*bound.args, **bound.kwargs)
            finally:
                watched.work.end()

    return loop_of_worker


def _rank(strategy) -> int | None:
    """This process's number among several, the chief's is 0."""
    if not replica_context.spans_processes(strategy):
        return None
    return replica_context.process_id(strategy)


class _Watched(keras.callbacks.Callback):
    """A batch may not wait for ever, for data or for another worker."""

    def __init__(self, model: keras.Model):
        super().__init__()
        own = getattr(
            getattr(model, "optimizer", None), "communication", _active[-1]
        )
        self.work = watchdog.Work(
            max(own.timeout_seconds, _active[-1].timeout_seconds)
        )

    def _begin(self, *_, **__):
        self.work.begin()

    def _end(self, *_, **__):
        self.work.end()

    on_train_batch_begin = on_test_batch_begin = on_predict_batch_begin = _begin
    on_train_batch_end = on_test_batch_end = on_predict_batch_end = _end
    # Data that end after a batch has begun.
    on_epoch_end = on_test_end = on_predict_end = _end


def _maybe_symbolic_build(original):
    def maybe_symbolic_build(self, iterator=None, data_batch=None):
        strategy = self._distribute_strategy
        if (
            strategy is None
            or iterator is None
            or not replica_context.spans_processes(strategy)
        ):
            return original(self, iterator, data_batch)
        for _, _, batches in iterator:
            # Only shapes and types count, and one replica's are as good as all.
            data_batch = tf.nest.map_structure(
                lambda one: strategy.experimental_local_results(one)[0],
                next(batches),
            )
            break
        with strategy.scope():
            self._symbolic_build(data_batch=data_batch)

    return maybe_symbolic_build


def _reduce_per_replica(original):
    def reduce_per_replica(values, strategy, reduction):
        if replica_context.spans_processes(strategy) and reduction in (
            "auto",
            "mean",
        ):
            return _mean(values, strategy, _active[-1])
        return original(values, strategy, reduction)

    return reduce_per_replica


def _mean(values, strategy, communication):
    """The mean over all replicas, of what each returned from a step."""

    def on_replica(parts):
        here = replica_context.current()
        groups = cross_shard_optimizer.groups_for(None, here.num_replicas)
        parts = [
            part if part.dtype.is_floating else tf.cast(part, tf.float32)
            for part in map(tf.convert_to_tensor, parts)
        ]
        sums = reduction.sum_dense(
            parts,
            transports.choose(here, groups),
            (here, groups, communication),
        )
        return [total / here.num_replicas for total in sums]

    means = strategy.run(on_replica, (keras.tree.flatten(values),))
    return keras.tree.pack_sequence_as(
        values, [strategy.experimental_local_results(one)[0] for one in means]
    )
