"""What makes a script's replicas equal one device: each cause with its cure.

A cure is applied to the run, not to the script's text.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import keras
import tensorflow as tf

import tf_xshard
from tf_xshard.private import frames


class Cure(NamedTuple):
    """A cause, and what helps.

    Attributes:
      cause: The cause, as the verdict names it.
      advice: What to write in the script.
      changes: Yields what applies the cure and takes it back.
      needs: The script must use it: a layer, "loss" or "loss function".
      on_one_device: Whether the run on one replica gets it, too.
    """

    cause: str
    advice: str
    changes: Callable[[], Iterator[contextlib.AbstractContextManager]]
    needs: str = ""
    on_one_device: bool = False


def _is_users(optimizer: Any) -> bool:
    return isinstance(optimizer, keras.optimizers.Optimizer) and not isinstance(
        optimizer,
        (
            tf_xshard.CrossShardOptimizer,
            tf_xshard.TowerOptimizer,
            tf_xshard.AGNOptimizer,
        ),
    )


def _around_argument(
    owner: type, method: str, argument: str, changed: Callable[[Any], Any]
) -> contextlib.AbstractContextManager:
    """Changes one argument of each call of a method, if it is passed."""
    plain = getattr(owner, method)
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        bound.arguments[argument] = changed(bound.arguments[argument])
        return plain(*bound.args, **bound.kwargs)

    return mock.patch.object(owner, method, call)


def _wrapped(**options: Any) -> Iterator[contextlib.AbstractContextManager]:
    """Wraps the optimizers that `compile` gets, and those of custom loops."""

    def wrap(optimizer: Any) -> Any:
        optimizer = keras.optimizers.get(optimizer)
        if not _is_users(optimizer):
            return optimizer
        return tf_xshard.CrossShardOptimizer(optimizer, **options)

    yield _around_argument(keras.Model, "compile", "optimizer", wrap)
    yield _applied(wrap)


@contextlib.contextmanager
def _applied(wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Makes a plain optimizer's `apply` in a custom loop go through a wrapper.

    A wrapper's own call of `apply` is left alone.
    """
    owner = next(
        one
        for one in keras.optimizers.Optimizer.__mro__
        if "apply" in vars(one)
    )
    plain = owner.apply
    wrappers: dict[int, Any] = {}
    lock = threading.Lock()

    @functools.wraps(plain)
    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None):
        in_replica = (
            tf.distribute.has_strategy()
            and not tf.distribute.in_cross_replica_context()
        )
        if not in_replica or not _is_users(optimizer) or _is_inside_a_wrapper():
            return plain(optimizer, grads, trainable_variables)
        with lock:  # Each replica is a thread.
            if id(optimizer) not in wrappers:
                # A wrapper refuses that others call its inner optimizer.
                with tf.init_scope():
                    inner = type(optimizer).from_config(optimizer.get_config())
                    wrappers[id(optimizer)] = wrap(inner)
        return wrappers[id(optimizer)].apply(grads, trainable_variables)

    with mock.patch.object(owner, "apply", apply):
        yield


def _is_inside_a_wrapper() -> bool:
    folder = os.path.join(os.path.dirname(tf_xshard.__file__), "optimizers", "")
    return any(
        frame.f_code.co_filename.startswith(folder)
        for frame in frames.callers()
    )


def _global_mean() -> Iterator[contextlib.AbstractContextManager]:
    def global_mean(loss: Any) -> Any:
        if loss is None or isinstance(loss, tf_xshard.GlobalMean):
            return loss
        if isinstance(loss, dict):
            return {name: global_mean(one) for name, one in loss.items()}
        if isinstance(loss, (list, tuple)):
            return [global_mean(one) for one in loss]
        return tf_xshard.GlobalMean(loss)

    yield _around_argument(keras.Model, "compile", "loss", global_mean)


def _scalar_loss() -> Iterator[contextlib.AbstractContextManager]:
    def scalar(loss: Any) -> Any:
        is_function = callable(loss) and not isinstance(
            loss, (keras.losses.Loss, type)
        )
        return tf_xshard.ScalarLoss(loss) if is_function else loss

    yield _around_argument(keras.Model, "compile", "loss", scalar)


def _synchronized() -> Iterator[contextlib.AbstractContextManager]:
    yield _around_argument(
        keras.layers.BatchNormalization,
        "__init__",
        "synchronized",
        lambda synchronized: True,
    )


# In the order in which they are tried. They add up.
CURES = {
    "wrapper": Cure(
        "the optimizer clips, accumulates or updates before the gradients of"
        " all replicas are summed",
        "wrap it: tf_xshard.CrossShardOptimizer(optimizer)",
        _wrapped,
    ),
    "undivided loss": Cure(
        "each replica's loss is a mean over its own rows, and the sum of the"
        " gradients is N times too large",
        "tf_xshard.CrossShardOptimizer(optimizer,"
        ' loss_normalization="replica")',
        lambda: _wrapped(loss_normalization="replica"),
    ),
    "scalar loss": Cure(
        "the loss function returns one number, which Keras does not divide by"
        " the number of replicas",
        "compile(loss=tf_xshard.ScalarLoss(loss))",
        _scalar_loss,
        "loss function",
    ),
    "global mean": Cure(
        "batches have different numbers of rows or weights on the replicas,"
        " and Keras averages the replicas' means",
        "compile(loss=tf_xshard.GlobalMean(loss))",
        _global_mean,
        "loss",
    ),
    "batch normalization": Cure(
        "BatchNormalization computes its statistics on each replica",
        "keras.layers.BatchNormalization(synchronized=True)",
        _synchronized,
        "BatchNormalization",
    ),
    "repeated rows": Cure(
        "rows of an Embedding occur several times in a batch, and Keras'"
        " optimizer on one device updates each occurrence by itself",
        "use the wrapper on one device, too: its numbers are those of summed"
        " rows",
        _wrapped,
        "Embedding",
        on_one_device=True,
    ),
}


def changes(
    names: Sequence[str],
) -> Iterator[contextlib.AbstractContextManager]:
    """Yields what applies the named cures."""
    for name in names:
        yield from CURES[name].changes()
