"""Applies reduced gradients with the inner optimizer, on this replica only."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_xshard.distribute import indexed_slices
from tf_xshard.distribute import reduction_guard
from tf_xshard.optimizers import stack
from tf_xshard.private.keras import local_optimizers
from tf_xshard.private.tensorflow import autograph
from tf_xshard.reduction import gradients as gradients_lib


def make_local(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer and all optimizers inside update this replica only."""
    # Callers repeat this idempotent call after `build`, where a MultiOptimizer
    # may create its optimizers.
    local_optimizers.make_local(_foreign(optimizer))


def refuse_own_reductions(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises what `make_local` would raise, and changes nothing."""
    local_optimizers.refuse_own_reductions(_foreign(optimizer))


def _foreign(optimizer: Any) -> list[keras.optimizers.Optimizer]:
    return [
        one for one in stack.descendants(optimizer) if not stack.is_wrapper(one)
    ]


def note_summed_rows(optimizer: keras.optimizers.Optimizer) -> None:
    """Logs once per class that embeddings train differently in plain Keras."""
    for one in stack.updating(optimizer):
        # SGD is linear in the gradient, so summing first changes nothing.
        if not isinstance(one, keras.optimizers.SGD):
            _log_summed_rows(type(one).__name__)


@functools.cache
def _log_summed_rows(name: str) -> None:
    logging.warning(
        "tf_xshard sums the gradients of a row that occurs several times in a"
        " batch (an Embedding) before %s uses them. Plain Keras does not, so"
        " the results differ from plain Keras. They equal the results with the"
        " dense gradient, tf.convert_to_tensor(gradient).",
        name,
    )


def apply(
    optimizer: keras.optimizers.Optimizer, batch: gradients_lib.GradientBatch
) -> None:
    """Applies reduced gradients with the inner optimizer on this replica."""
    pairs = batch.pairs()
    if any(one.loss_scale_factor for one in stack.descendants(optimizer)):
        # Keras divides gradients by the factor; IndexedSlices can't be divided.
        pairs = [
            (indexed_slices.dense(gradient, variable), variable)
            if isinstance(gradient, tf.IndexedSlices)
            else (gradient, variable)
            for gradient, variable in pairs
        ]
    # Call `apply_gradients`, as `fit` does, since a subclass may override it.
    # AutoGraph converts a user's subclass like the user's other code.
    apply_gradients = autograph.as_called_by_user(optimizer.apply_gradients)
    with reduction_guard.guarded(optimizer):
        apply_gradients(pairs)
