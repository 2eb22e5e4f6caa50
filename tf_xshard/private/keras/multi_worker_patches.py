"""Replaces functions of Keras's training loops that fail across processes.

This module recognizes and replaces these functions, which Keras does not
export. `multi_worker.fit` has the replacements.
"""

from __future__ import annotations

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
    },
)
names.attributes(NAMES.feature, "_distribute_strategy")
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

    def undo() -> None:
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
