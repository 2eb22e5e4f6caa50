"""Keras' `fit`, `evaluate` and `predict` over several processes.

The third door to names that Keras does not export.
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
    changes for other strategies, nor where Keras has mended its own code.

    In `fit`, workers other than the chief print nothing, unless `verbose` is
    given, leave out `CSVLogger`, `TensorBoard` and `RemoteMonitor`, and write
    what `ModelCheckpoint` saves into a temporary directory (all have to take
    part, since reading a variable can be a collective). `BackupAndRestore` has
    a directory for each of them, with `_worker_1` and so on at the end.

    Args:
      communication: How metrics travel at each step, in their own type; its
        timeout holds for them. None (default) for `Communication()`.

    Returns:
      A `MultiWorkerFit`, which is a context manager and has `undo()`.

    Raises:
      RuntimeError: If this Keras has changed these places in a way that is not
        known, so that nothing can be said about them.

    Example:

    >>> with tf_xshard.multi_worker_fit():
    ...     pass  # model.fit(...)

    Source: keras#20585.
    """
    if _active:
        # Whoever came first undoes it.
        return MultiWorkerFit(lambda: None)
    # Metrics travel in their own type, which has to count exactly.
    communication = dataclasses.replace(
        communication or communication_lib.Communication(), dtype=None
    )
    places = {
        "_maybe_symbolic_build": (
            _trainer.TensorFlowTrainer,
            _maybe_symbolic_build,
        ),
        "reduce_per_replica": (
            _trainer,
            functools.partial(_reduce_per_replica, communication),
        ),
    }
    originals = {
        name: getattr(owner, name) for name, (owner, _) in places.items()
    }
    states = {name: _state_of(name, one) for name, one in originals.items()}
    if "unknown" in states.values():
        raise RuntimeError(
            "tf_xshard.multi_worker_fit() can't tell whether fit works over"
            f" several processes in Keras {keras.__version__}: {states}. It is"
            f" known of Keras {versions.KERAS[0]} to {versions.KERAS[1]}; leave"
            " the call out to see."
        )
    wrong = [name for name, state in states.items() if state == "wrong"]
    if not wrong:
        logging.info(
            "Keras %s has mended what multi_worker_fit() replaces.",
            keras.__version__,
        )
    for name in wrong:
        owner, make = places[name]
        setattr(owner, name, make(originals[name]))
    fit = keras.Model.fit
    keras.Model.fit = chief_callbacks.with_callbacks_of_worker(fit)

    def undo():
        for name in wrong:
            setattr(places[name][0], name, originals[name])
        keras.Model.fit = fit
        _active.clear()

    result = MultiWorkerFit(undo)
    _active.append(result)
    return result


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


def _reduce_per_replica(communication, original):
    def reduce_per_replica(values, strategy, reduction):
        if replica_context.spans_processes(strategy) and reduction in (
            "auto",
            "mean",
        ):
            return _mean(values, strategy, communication)
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
