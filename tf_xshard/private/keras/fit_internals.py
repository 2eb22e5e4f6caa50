"""Reads and sets private attributes of Keras models, for callbacks and saving.

The attributes of optimizers are in `optimizer_state`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.private import frames
from tf_xshard.private import names

# Keras's own step has the labels, the predictions and the loss in local
# variables, and the model has its compiled losses. Present in 3.12 to 3.16.
_TRAIN_STEP = keras.Model.train_step
names.attributes(
    "GroupCheckpoint without a strategy",
    # What a compiled model creates from the first batch, and its creation.
    "_compile_metrics",
    "_compile_loss",
    "_symbolic_build",
)
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


class _Skip:
    """Reads batches without training on them, instead of `train_function`."""

    def __init__(
        self,
        model: keras.Model,
        num_steps: int,
        on_new_metrics: Callable[[], None],
    ) -> None:
        self._model = model
        self._train_function = model.train_function
        self._on_new_metrics = on_new_metrics
        self._remaining = num_steps
        # `history` is None if the list of callbacks keeps no history.
        self._history = getattr(model, "history", None)

    def is_over(self) -> bool:
        """Returns True if the next step trains."""
        # Each `fit` has its own history. Another history means that the first
        # `fit` ended in the middle of an epoch.
        history = getattr(self._model, "history", None)
        return self._remaining <= 0 or history is not self._history

    def __call__(self, iterator: Iterator) -> Any:
        """Reads the batches of one call, and returns the metrics."""
        model = self._model
        if self.is_over():
            model.train_function = self._train_function
            return self._train_function(iterator)
        self._remaining -= model.steps_per_execution
        for index in range(model.steps_per_execution):
            try:
                batch = next(iterator)
            except StopIteration:
                # The epoch's last execution may have had fewer steps.
                if index == 0:
                    raise
                break
            # Without a strategy, only the first step that trains would.
            if _has_unbuilt_metrics(model):
                model._symbolic_build(data_batch=batch)
                self._on_new_metrics()
        return model.get_metrics_result()


def skip_steps(
    model: keras.Model, num_steps: int, on_new_metrics: Callable[[], None]
) -> None:
    """Makes the running `fit` read batches without training on them.

    Calls `on_new_metrics` if the first batch creates the model's metrics.
    """
    if num_steps > 0:
        model.train_function = _Skip(model, num_steps, on_new_metrics)


def is_skipping(model: keras.Model) -> bool:
    """Returns True if the next step of `fit` is one to skip."""
    function = model.train_function
    return isinstance(function, _Skip) and not function.is_over()


def _has_unbuilt_metrics(model: keras.Model) -> bool:
    found = [model._compile_metrics]
    # A user's train_step may never use the compiled loss, which has metrics if
    # there are several outputs.
    if type(model).train_step is _TRAIN_STEP:
        found.append(model._compile_loss)
    return any(one is not None and not one.built for one in found)


def is_for_the_chief_only(callback: Any) -> bool:
    """Returns True if a callback says that only the chief should call it."""
    # Keras 2 marked its callbacks with this attribute, and users' callbacks
    # still have it.
    return getattr(callback, "_chief_worker_only", False)


def losses_of_the_step() -> list[tuple[keras.losses.Loss, Any, Any]]:
    """Returns the losses of the calling `train_step`, with their arguments."""
    # The labels' shapes decide if a loss returns one number.
    found = _variables_of_the_step()
    if found is None:
        return []
    model, y, y_pred = (found[k] for k in ("self", "y", "y_pred"))
    try:
        return [
            (loss, _at(path, y), _at(path, y_pred))
            for path, loss, *_ in model._compile_loss._flat_losses
        ]
    except (AttributeError, KeyError, IndexError, TypeError):
        return []  # There is no loss, or labels have another structure.


def own_loss_of_the_step() -> tuple[str, tf.Tensor] | None:
    """Returns what a model's own `compute_loss` returned in the `train_step`.

    Returns the name of the model's class and the loss, or None.
    """
    found = _variables_of_the_step()
    if found is None:
        return None
    own = getattr(found["self"].compute_loss, "__func__", None)
    if own is keras.Model.compute_loss:
        return None
    return type(found["self"]).__name__, found["loss"]


def _variables_of_the_step() -> dict[str, Any] | None:
    """Returns the local variables of the calling `train_step` of Keras."""
    # An optimizer knows neither its model nor the labels.
    steps = (f for f in frames.callers() if f.f_code is _TRAIN_STEP.__code__)
    frame = next(steps, None)
    return None if frame is None else frame.f_locals


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
