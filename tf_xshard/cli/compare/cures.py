"""Lists the causes of a difference, each with its cure.

A cure is applied to the run, not to the script's text.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import tf_xshard
from tf_xshard.cli.compare import patches
from tf_xshard.private import frames


class Cure(NamedTuple):
    """A cause, and what helps.

    Attributes:
      cause: The cause, as the verdict names it.
      advice: What to write in the script.
      changes: Yields what applies the cure and takes it back.
      needs: The script must use it: a layer, "loss" or "loss function".
      on_one_device: Whether the run on one replica gets it, too.
      instead_of: The cure that it contains, and takes the place of.
    """

    cause: str
    advice: str
    changes: Callable[[], Iterator[patches.Patch]]
    needs: str = ""
    on_one_device: bool = False
    instead_of: str = ""


def _is_users(optimizer: Any) -> bool:
    return isinstance(optimizer, keras.optimizers.Optimizer) and not isinstance(
        optimizer,
        (
            tf_xshard.CrossShardOptimizer,
            tf_xshard.TowerOptimizer,
            tf_xshard.AGNOptimizer,
        ),
    )


def _wrapped(**options: Any) -> Iterator[patches.Patch]:
    """Wraps the optimizers that `compile` gets, and those of custom loops."""

    def wrap(optimizer: Any) -> Any:
        optimizer = keras.optimizers.get(optimizer)
        if not _is_users(optimizer):
            return optimizer
        return tf_xshard.CrossShardOptimizer(optimizer, **options)

    yield patches.around_argument(keras.Model, "compile", "optimizer", wrap)
    # A wrapper refuses that others call its inner optimizer: a loop's calls of
    # its optimizer go to a wrapped copy.
    wrappers: dict[int, Any] = {}
    lock = threading.Lock()

    def call(name: str, plain: Callable, optimizer: Any, *args, **kwargs):
        if not _is_users(optimizer) or _is_inside_a_wrapper():
            return plain(optimizer, *args, **kwargs)
        with lock:  # Each replica is a thread.
            if id(optimizer) not in wrappers:
                with tf.init_scope():
                    copy = type(optimizer).from_config(optimizer.get_config())
                    wrappers[id(optimizer)] = wrap(copy)
        return getattr(wrappers[id(optimizer)], name)(*args, **kwargs)

    for name in ("build", "apply"):
        yield patches.around(
            keras.optimizers.Optimizer, name, functools.partial(call, name)
        )


def _is_inside_a_wrapper() -> bool:
    # Only the frames tell who calls an optimizer.
    folder = os.path.join(os.path.dirname(tf_xshard.__file__), "optimizers", "")
    return any(
        frame.f_code.co_filename.startswith(folder)
        for frame in frames.callers()
    )


def _global_mean() -> Iterator[patches.Patch]:
    def global_mean(loss: Any) -> Any:
        if loss is None or isinstance(loss, tf_xshard.GlobalMean):
            return loss
        if isinstance(loss, dict):
            return {name: global_mean(one) for name, one in loss.items()}
        if isinstance(loss, (list, tuple)):
            return [global_mean(one) for one in loss]
        return tf_xshard.GlobalMean(loss)

    yield patches.around_argument(keras.Model, "compile", "loss", global_mean)


def _scalar_loss() -> Iterator[patches.Patch]:
    def scalar(loss: Any) -> Any:
        is_function = callable(loss) and not isinstance(
            loss, (keras.losses.Loss, type)
        )
        return tf_xshard.ScalarLoss(loss) if is_function else loss

    yield patches.around_argument(keras.Model, "compile", "loss", scalar)


def _synchronized() -> Iterator[patches.Patch]:
    yield patches.around_argument(
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
    "scalar loss": Cure(
        "the loss function returns one number, which Keras does not divide by"
        " the number of replicas",
        "compile(loss=tf_xshard.ScalarLoss(loss))",
        _scalar_loss,
        "loss function",
    ),
    "undivided loss": Cure(
        "each replica's loss is a mean over its own rows, and the sum of the"
        " gradients is as many times too large as there are replicas",
        "tf_xshard.CrossShardOptimizer(optimizer,"
        ' loss_normalization="replica")',
        lambda: _wrapped(loss_normalization="replica"),
        instead_of="wrapper",
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


def patches_of(names: Sequence[str]) -> Iterator[patches.Patch]:
    """Yields what applies the named cures."""
    for name in names:
        yield from CURES[name].changes()
