"""What Keras' `fit` keeps to itself and callbacks have to touch.

The second door to names that Keras does not export; the optimizers' is
`inner_update`. `tests/private_names_test.py` runs what uses them.
"""

from __future__ import annotations

import keras


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
      num_steps: How many batches.
    """
    train_function = model.train_function
    remaining = num_steps

    def skip(iterator):
        nonlocal remaining
        remaining -= model.steps_per_execution
        try:
            for _ in range(model.steps_per_execution):
                next(iterator)
        except BaseException:
            remaining = 0
            raise
        finally:
            if remaining <= 0:
                model.train_function = train_function
        return model.get_metrics_result()

    if num_steps > 0:
        model.train_function = skip
