"""Lists the causes of a difference, each with its cure.

A cure is applied to the run, not to the script's text.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
      changes: Yields the context managers that apply the cure; None if it only
        wraps.
      wraps: The arguments of a wrapper around the optimizers, or None.
      needs: The script must use it: a layer, "loss" or "loss function".
      on_one_device: Whether also the run on one replica gets it.
      instead_of: The cure that it contains, and takes the place of.
    """

    cause: str
    advice: str
    changes: Callable[[], Iterator[patches.Patch]] | None = None
    wraps: Mapping[str, Any] | None = None
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


def _wrapped(options: Mapping[str, Any]) -> Iterator[patches.Patch]:
    """Wraps the optimizers of `compile` and of custom loops."""

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


def _of_losses(changed: Callable[[Any], Any]) -> Iterator[patches.Patch]:
    """Changes each loss that `compile` gets."""

    def change(loss: Any) -> Any:
        if isinstance(loss, dict):
            return {name: change(one) for name, one in loss.items()}
        if isinstance(loss, (list, tuple)):
            return [change(one) for one in loss]
        return loss if loss is None else changed(loss)

    yield patches.around_argument(keras.Model, "compile", "loss", change)


def _global_mean(loss: Any) -> Any:
    if isinstance(loss, tf_xshard.GlobalMean):
        return loss
    return tf_xshard.GlobalMean(loss)


def _scalar_loss(loss: Any) -> Any:
    is_function = callable(loss) and not isinstance(
        loss, (keras.losses.Loss, type)
    )
    return tf_xshard.ScalarLoss(loss) if is_function else loss


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
        "optimizer = tf_xshard.CrossShardOptimizer(optimizer)",
        wraps={},
    ),
    "scalar loss": Cure(
        "the loss function returns one number, which Keras does not divide by"
        " the number of replicas",
        "compile(loss=tf_xshard.ScalarLoss(loss))",
        lambda: _of_losses(_scalar_loss),
        needs="loss function",
    ),
    "undivided loss": Cure(
        "each replica's loss is a mean over its own rows, and the sum of the"
        " gradients is as many times too large as there are replicas",
        "optimizer = tf_xshard.CrossShardOptimizer(optimizer,"
        ' loss_normalization="replica")',
        wraps={"loss_normalization": "replica"},
        instead_of="wrapper",
    ),
    "global mean": Cure(
        "batches have different numbers of rows or weights on the replicas,"
        " and Keras averages the replicas' means",
        "compile(loss=tf_xshard.GlobalMean(loss))",
        lambda: _of_losses(_global_mean),
        needs="loss",
    ),
    "batch normalization": Cure(
        "BatchNormalization computes its statistics on each replica",
        "keras.layers.BatchNormalization(synchronized=True)",
        _synchronized,
        needs="BatchNormalization",
    ),
    "repeated rows": Cure(
        "rows of an Embedding occur several times in a batch, and Keras's"
        " optimizer on one device updates each occurrence separately",
        "optimizer = tf_xshard.CrossShardOptimizer(optimizer), also on one"
        " device, where it sums the occurrences first",
        wraps={},
        needs="Embedding",
        on_one_device=True,
    ),
}


def patches_of(names: Sequence[str]) -> Iterator[patches.Patch]:
    """Yields what applies the named cures, with one wrapper for all."""
    some = [CURES[name] for name in names]
    for one in some:
        if one.changes is not None:
            yield from one.changes()
    if any(one.wraps is not None for one in some):
        options: dict[str, Any] = {}
        for one in some:
            options |= one.wraps or {}
        yield from _wrapped(options)
