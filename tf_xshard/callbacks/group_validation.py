"""Defines `GroupValidation`, which validates every group in `fit`."""

from __future__ import annotations

from typing import Any

import keras

from tf_xshard import checks
from tf_xshard.group_state import evaluate
from tf_xshard.group_state import state


class GroupValidation(keras.callbacks.Callback):
    """Adds each group's validation metrics to the logs of `fit`.

    `fit`'s own validation mixes the groups, since each replica uses its own
    weights. This callback evaluates each group on the complete data, and adds
    columns to the history and to the logs of later callbacks. The columns are
    `val_group_0_loss`, `val_group_1_loss` and so on, `val_ensemble_loss`, and
    the same columns for every metric.

    Args:
      data: See `GroupState.evaluate`.
      every: The number of epochs between validations. Default: 1.
      ensemble: Whether to add columns for the ensemble. Default: True.
      batch_size: See `keras.Model.evaluate`.
      steps: See `keras.Model.evaluate`.

    Raises:
      TypeError: If `data` is a generator.
      ValueError: If `every` is not a positive int.

    Example:

    >>> model = keras.Sequential([keras.layers.Input((2,)),
    ...                           keras.layers.Dense(1)])
    >>> model.compile(tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(0.1)),
    ...               "mse")
    >>> x, y = np.ones([8, 2]), np.ones([8, 1])
    >>> validation = tf_xshard.GroupValidation((x, y))
    >>> history = model.fit(x, y, verbose=0, callbacks=[validation])
    >>> list(history.history)
    ['loss', 'val_group_0_loss']

    Source: `validation_data` of `keras.Model.fit`, for every group.
    """

    def __init__(
        self,
        data: Any,
        every: int = 1,
        *,
        ensemble: bool = True,
        batch_size: int | None = None,
        steps: int | None = None,
    ) -> None:
        super().__init__()
        evaluate.refuse_generator(data)
        self._data = data
        self._every = checks.count("every", every)
        self._options = {
            "ensemble": ensemble,
            "batch_size": batch_size,
            "steps": steps,
        }
        self._state: Any = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Creates the model's `GroupState`.

        Args:
          logs: From Keras; not used.
        """
        del logs
        self._state = state.GroupState(self.model)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Adds the columns to the logs.

        Args:
          epoch: Index of the epoch.
          logs: From Keras; gets the columns.
        """
        if logs is None or (epoch + 1) % self._every:
            return
        for row in self._state.evaluate(self._data, **self._options):
            group = row.pop("group")
            name = group if group == "ensemble" else f"group_{group}"
            logs.update(
                {f"val_{name}_{metric}": value for metric, value in row.items()}
            )
