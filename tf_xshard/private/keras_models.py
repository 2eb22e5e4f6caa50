"""What a Keras model keeps to itself and callbacks and saving have to touch.

Another door to what Keras does not export; the optimizers' is `inner_update`.
`tests/conformance/private_names_test.py` looks at what this rests on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf


def start_at_epoch(model: keras.Model, epoch: int | None) -> None:
    """Makes the running `fit` begin with an epoch; None for its own.

    Args:
      model: The model that is trained, before its first epoch.
      epoch: Index of the epoch.
    """
    # What keras.callbacks.BackupAndRestore sets; `fit` has no public way.
    model._initial_epoch = epoch


def skip_steps(model: keras.Model, num_steps: int) -> None:
    """Makes the running `fit` read so many batches and not train on them.

    Args:
      model: The model that is trained, at the beginning of an epoch.
      num_steps: How many batches, a multiple of `steps_per_execution`.
    """
    train_function = model.train_function
    # None for a list of callbacks that keeps no history.
    history = getattr(model, "history", None)
    remaining = num_steps

    def skip(iterator):
        nonlocal remaining
        # `fit` has a history of its own: this one was left in mid-epoch.
        if remaining <= 0 or getattr(model, "history", None) is not history:
            model.train_function = train_function
            return train_function(iterator)
        remaining -= model.steps_per_execution
        for index in range(model.steps_per_execution):
            try:
                next(iterator)
            except StopIteration:
                # The epoch's last execution may have had fewer.
                if index == 0:
                    raise
                break
        return model.get_metrics_result()

    if num_steps > 0:
        model.train_function = skip


@contextlib.contextmanager
def losses_instead(
    model: keras.Model, losses: Sequence[tf.Tensor]
) -> Iterator[None]:
    """Makes `model.losses`, which `compute_loss` adds, something else."""
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
    """Makes a model's optimizer and its compile config others.

    Without `compile`, which would make its metrics and functions anew.
    """
    before = model.optimizer
    # Not through Keras, which would make the optimizer a part of the model.
    object.__setattr__(model, "optimizer", optimizer)
    object.__setattr__(model, "get_compile_config", lambda: config)
    try:
        yield
    finally:
        object.__setattr__(model, "optimizer", before)
        object.__delattr__(model, "get_compile_config")
