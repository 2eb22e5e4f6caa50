"""Reads and sets private attributes of Keras models, for callbacks and saving.

The attributes of optimizers are in `optimizer_state`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.private import frames
from tf_xshard.private import names

# Keras's own step has the labels and predictions in local variables, and the
# model has its compiled losses. Present in 3.12 to 3.16.
_TRAIN_STEP = keras.Model.train_step
names.attributes(
    "ScalarLoss and what fit calls",
    # The losses of a compiled model.
    "_compile_loss",
    "_flat_losses",
    # The epoch at which `fit` starts, if it is not 0.
    "_initial_epoch",
    # The losses that `model.losses` returns instead of the layers' losses.
    "_losses_override",
)


def start_at_epoch(model: keras.Model, epoch: int | None) -> None:
    """Makes the running `fit` start at an epoch; None for the epoch it has."""
    # keras.callbacks.BackupAndRestore does the same, since `fit` has no public
    # API for it.
    model._initial_epoch = epoch


def skip_steps(model: keras.Model, num_steps: int) -> None:
    """Makes the running `fit` read batches without training on them."""
    train_function = model.train_function
    # `history` is None if the list of callbacks keeps no history.
    history = getattr(model, "history", None)
    remaining = num_steps

    def is_over():
        # Each `fit` has its own history. Another history means that the first
        # `fit` ended in the middle of an epoch.
        return remaining <= 0 or getattr(model, "history", None) is not history

    def skip(iterator):
        nonlocal remaining
        if is_over():
            model.train_function = train_function
            return train_function(iterator)
        remaining -= model.steps_per_execution
        for index in range(model.steps_per_execution):
            try:
                next(iterator)
            except StopIteration:
                # The epoch's last execution may have had fewer steps.
                if index == 0:
                    raise
                break
        return model.get_metrics_result()

    if num_steps > 0:
        skip.is_over = is_over
        model.train_function = skip


def is_skipping(model: keras.Model) -> bool:
    """Returns True if the next step of `fit` is one to skip."""
    is_over = getattr(model.train_function, "is_over", None)
    return is_over is not None and not is_over()


def is_for_the_chief_only(callback: Any) -> bool:
    """Returns True if a callback says that only the chief should call it."""
    # Keras 2 marked its callbacks with this attribute, and users' callbacks
    # still have it.
    return getattr(callback, "_chief_worker_only", False)


def losses_of_the_step() -> list[tuple[keras.losses.Loss, Any, Any]]:
    """Returns the losses of the calling `train_step`, with their arguments."""
    # An optimizer knows neither its model nor the labels. The labels' shapes
    # decide if a loss returns one number.
    steps = (f for f in frames.callers() if f.f_code is _TRAIN_STEP.__code__)
    frame = next(steps, None)
    if frame is None:
        return []
    model, y, y_pred = (frame.f_locals[k] for k in ("self", "y", "y_pred"))
    try:
        return [
            (loss, _at(path, y), _at(path, y_pred))
            for path, loss, *_ in model._compile_loss._flat_losses
        ]
    except (AttributeError, KeyError, IndexError, TypeError):
        return []  # There is no loss, or labels have another structure.


def compiled_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """Returns the losses of a compiled model, [] before their first call."""
    compiled = getattr(model, "_compile_loss", None)
    return [
        loss for _, loss, *_ in getattr(compiled, "_flat_losses", None) or []
    ]


def _at(path: Sequence, value: Any) -> Any:
    for key in path:
        value = value[key]
    return value


def update_loss_metric(
    model: keras.Model, loss: tf.Tensor, num_rows: int | tf.Tensor
) -> None:
    """Adds a batch's loss to the metric that `fit` shows as "loss".

    Keras updates the metric in `train_step` and `test_step`, which steps of
    tf_xshard replace.
    """
    num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
    for metric in model.metrics:
        if metric.name == "loss":
            metric.update_state(loss * num_replicas, sample_weight=num_rows)


@contextlib.contextmanager
def losses_instead(
    model: keras.Model, losses: Sequence[tf.Tensor]
) -> Iterator[None]:
    """Replaces `model.losses`, which `compute_loss` adds."""
    before = model._losses_override
    model._losses_override = list(losses)
    try:
        yield
    finally:
        model._losses_override = before


@contextlib.contextmanager
def compiled_with(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, config: dict
) -> Iterator[None]:
    """Replaces a model's optimizer and its compile config in this context."""
    # `compile` would recreate the model's metrics and functions.
    before = model.optimizer
    # A plain assignment would make the optimizer part of the model.
    object.__setattr__(model, "optimizer", optimizer)
    object.__setattr__(model, "get_compile_config", lambda: config)
    try:
        yield
    finally:
        object.__setattr__(model, "optimizer", before)
        object.__delattr__(model, "get_compile_config")
