"""Replaces functions of Keras's training loops that fail across processes.

This module recognizes and replaces these functions, which Keras does not
export. `multi_worker.fit` has the replacements.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_xshard import dependencies
from tf_xshard.private import names

_MODEL = "keras.Model."
# Present in Keras 3.12 to 3.16.
NAMES = names.PrivateNames(
    "tf_xshard.multi_worker_fit()",
    {
        # Takes the mean of a tuple of PerReplica values, on which
        # MultiWorkerMirroredStrategy raises (keras#20585).
        "maybe_build": _MODEL + "_maybe_symbolic_build",
        # The method above calls this method, which is correct.
        "build": _MODEL + "_symbolic_build",
        # Reduces scalars over dimension 0, which they do not have.
        "module": "keras.src.backend.tensorflow.trainer",
        "reduce_per_replica": (
            "keras.src.backend.tensorflow.trainer.reduce_per_replica"
        ),
        # Counts the batches of this worker only, and ends an epoch there.
        "epoch_iterator": (
            "keras.src.backend.tensorflow.trainer.TFEpochIterator"
        ),
    },
)
names.attributes(
    NAMES.feature,
    "_distribute_strategy",
    # The number of batches, None if it is unknown, and what counts them.
    "_num_batches",
    "_distributed_dataset",
)
# The SHA-256 of sources that are known to be wrong, in Keras 3.12 to 3.16.
_KNOWN_WRONG = {
    "_maybe_symbolic_build": "92a504f5eba9b29f",
    "reduce_per_replica": "2e7d54b1e6edc29a",
}
# The wrong calls in these sources. A source without its call has been changed.
_WRONG_CALLS = {
    "_maybe_symbolic_build": "distribute_strategy.reduce(",
    "reduce_per_replica": 'strategy.reduce("MEAN", v, axis=0)',
}
LOOPS = ("fit", "evaluate", "predict")


@dataclasses.dataclass(frozen=True)
class Batches:
    """Describes the data of a call of `fit`, `evaluate` or `predict`.

    Attributes:
      count: The number of batches, or TensorFlow's number for an infinite or
        unknown cardinality.
      steps: The argument `steps_per_epoch`, `validation_steps` or `steps`.
      is_own_pipeline: Whether each worker has its own pipeline. Otherwise,
        each worker takes its part of every batch.
      description: Says what the worker has, for errors.
    """

    count: int
    steps: int | None
    is_own_pipeline: bool
    description: str


def state_of(name: str, function: Callable) -> str:
    """Returns `"wrong"`, `"right"` or `"unknown"` for a function of Keras."""
    source = inspect.getsource(function)
    digest = hashlib.sha256(source.encode()).hexdigest()
    if digest.startswith(_KNOWN_WRONG[name]):
        return "wrong"
    return "unknown" if _WRONG_CALLS[name] in source else "right"


def replace(
    loop_of_worker: Callable[[Callable], Callable],
    mean_of_replicas: Callable[[Any, tf.distribute.Strategy], Any],
    agreed_count: Callable[[tf.distribute.Strategy, Batches], int],
    spans_processes: Callable[[tf.distribute.Strategy], bool],
) -> Callable[[], None]:
    """Replaces the functions that fail; returns a function to undo it."""
    NAMES.check()
    trainer: Any = names.defining_class(keras.Model, "fit")
    places = {
        "_maybe_symbolic_build": (
            trainer,
            lambda original: _maybe_symbolic_build(original, spans_processes),
        ),
        "reduce_per_replica": (
            NAMES.module,
            lambda original: _reduce_per_replica(
                original, spans_processes, mean_of_replicas
            ),
        ),
    }
    originals = {
        name: getattr(owner, name) for name, (owner, _) in places.items()
    }
    try:
        states = {name: state_of(name, one) for name, one in originals.items()}
    except OSError as error:
        states = {"source": f"unknown ({error})"}
    if any(state.startswith("unknown") for state in states.values()):
        raise RuntimeError(
            "tf_xshard.multi_worker_fit() does not know whether fit works"
            f" across several processes in Keras {keras.__version__}: {states}."
            f" It knows Keras {dependencies.tested_range('keras')}. To try fit"
            " anyway, leave the call out."
        )
    wrong = [name for name, state in states.items() if state == "wrong"]
    for name in set(states) - set(wrong):
        logging.warning(
            "Keras %s has changed %s and removed the wrong call:"
            " multi_worker_fit() leaves it unchanged.",
            keras.__version__,
            name,
        )
    for name in wrong:
        owner, make = places[name]
        setattr(owner, name, make(originals[name]))
    loops = {name: getattr(trainer, name) for name in LOOPS}
    for name, loop in loops.items():
        setattr(trainer, name, loop_of_worker(loop))
    epoch_iterator = NAMES.epoch_iterator
    NAMES.module.TFEpochIterator = _epoch_iterator(
        epoch_iterator, spans_processes, agreed_count
    )

    def undo() -> None:
        NAMES.module.TFEpochIterator = epoch_iterator
        for name in wrong:
            setattr(places[name][0], name, originals[name])
        for name, loop in loops.items():
            setattr(trainer, name, loop)

    return undo


def _maybe_symbolic_build(
    original: Callable, spans_processes: Callable
) -> Callable:
    def maybe_symbolic_build(self, iterator=None, data_batch=None):
        strategy = self._distribute_strategy
        if (
            strategy is None
            or iterator is None
            or not spans_processes(strategy)
        ):
            return original(self, iterator, data_batch)
        for _, _, batches in iterator:
            # Only shapes and dtypes matter, so one replica's batch is enough.
            data_batch = tf.nest.map_structure(
                lambda one: strategy.experimental_local_results(one)[0],
                next(batches),
            )
            break
        with strategy.scope():
            self._symbolic_build(data_batch=data_batch)

    return maybe_symbolic_build


def _reduce_per_replica(
    original: Callable, spans_processes: Callable, mean_of_replicas: Callable
) -> Callable:
    def reduce_per_replica(values, strategy, reduction):
        if spans_processes(strategy) and reduction in (
            "auto",
            "mean",
        ):
            return mean_of_replicas(values, strategy)
        return original(values, strategy, reduction)

    return reduce_per_replica


def _epoch_iterator(
    original: type, spans_processes: Callable, agreed_count: Callable
) -> type:
    class EpochIteratorOfWorker(original):
        """Counts as many batches as all workers have agreed on."""

        def __init__(self, distribute_strategy=None, *args, **kwargs):
            super().__init__(distribute_strategy, *args, **kwargs)
            self._data = kwargs.get("x")
            self._agree()

        def reset(self):
            super().reset()
            # A `PyDataset` may have changed its number of batches.
            self._agree()

        def _agree(self):
            strategy = self._distribute_strategy
            if strategy is None or not spans_processes(strategy):
                return
            count = agreed_count(strategy, self._batches())
            self._num_batches = None if count < 0 else count

        def _batches(self):
            count = self._num_batches
            if count is None:
                count = int(self._distributed_dataset.cardinality)
            if _is_not_divided(self._data) and count >= 0:
                # Each worker gets all rows, in smaller batches than those that
                # Keras has counted.
                count = tf.data.UNKNOWN_CARDINALITY
            return Batches(
                count,
                self.steps_per_epoch,
                _is_not_divided(self._data)
                or isinstance(self._data, tf.distribute.DistributedDataset),
                _described(self.data_adapter, count),
            )

    return EpochIteratorOfWorker


def _is_not_divided(data: Any) -> bool:
    """Returns True for a dataset that Keras leaves whole on each worker."""
    return isinstance(data, tf.data.Dataset) and (
        data.options().experimental_distribute.auto_shard_policy
        == tf.data.experimental.AutoShardPolicy.OFF
    )


def _described(adapter: Any, count: int) -> str:
    """Says how many batches there are, and of how many rows if it is known."""
    if count == tf.data.INFINITE_CARDINALITY:
        return "infinitely many batches"
    if count == tf.data.UNKNOWN_CARDINALITY:
        return "an unknown number of batches"
    if adapter.has_partial_batch is None:
        return f"{count} batches"
    size = adapter.batch_size
    last = adapter.partial_batch_size or size
    return f"{(count - 1) * size + last} rows in batches of {size}"
