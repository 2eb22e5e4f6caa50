"""Defines a callback of tf_keras that logs the measured communication."""

from __future__ import annotations

from typing import Any

from tf_xshard.callbacks import communication_ledger as ledger_lib


def communication_ledger(rows_per_step: int | None = None) -> Any:
    """Makes a `tf_xshard.CommunicationLedger` for tf_keras's `fit`.

    Args:
      rows_per_step: See `tf_xshard.CommunicationLedger`. Default: None.

    Returns:
      A `tf_keras.callbacks.Callback`, which adds the same numbers to the logs
      of each epoch, and has the same attribute `totals`.

    Raises:
      TypeError: If `rows_per_step` is not an int.
      ValueError: If `rows_per_step` is not positive.

    Example:

    >>> import tf_keras
    >>> model = tf_keras.Sequential([tf_keras.layers.Dense(2)])
    >>> model.compile(tf_xshard.tf_keras.with_aggregator(
    ...     tf_keras.optimizers.SGD()), "mse")
    >>> ledger = tf_xshard.tf_keras.communication_ledger()
    >>> history = model.fit(np.ones([8, 3]), np.ones([8, 2]), verbose=0,
    ...                     callbacks=[ledger])
    >>> history.history["communication_bytes"]  # There is one replica.
    [0.0]

    Source: `tf_xshard.CommunicationLedger`.
    """
    import tf_keras

    ledger = ledger_lib.CommunicationLedger(rows_per_step)

    def on_train_begin(logs: dict | None) -> None:
        ledger.set_model(callback.model)
        ledger.set_params(callback.params)
        ledger.on_train_begin(logs)

    callback = tf_keras.callbacks.LambdaCallback(
        on_train_begin=on_train_begin,
        on_epoch_begin=ledger.on_epoch_begin,
        on_batch_end=ledger.on_train_batch_end,
        on_epoch_end=ledger.on_epoch_end,
        on_train_end=ledger.on_train_end,
        totals=ledger.totals,
    )
    return callback
