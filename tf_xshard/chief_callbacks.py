"""Callbacks that write files, where several processes train one model."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator

import keras

from tf_xshard import replica_context

_CHIEF_ONLY = (
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def with_callbacks_of_worker(fit: Callable) -> Callable:
    """`fit`, in which workers do not write over each other's files.

    Args:
      fit: `keras.Model.fit`.

    Returns:
      A function like it.
    """
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def fit_of_worker(self, *args, **kwargs):
        strategy = self.distribute_strategy
        rank = _rank(strategy)
        if not rank:
            return fit(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs)
        arguments.apply_defaults()
        if arguments.arguments.get("verbose") == "auto":
            arguments.arguments["verbose"] = 0
        callbacks = arguments.arguments.get("callbacks")
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return fit(*arguments.args, **arguments.kwargs)
        if isinstance(callbacks, keras.callbacks.Callback):
            callbacks = [callbacks]
        with _of_worker(callbacks or (), rank) as own:
            arguments.arguments["callbacks"] = own
            return fit(*arguments.args, **arguments.kwargs)

    return fit_of_worker


def _rank(strategy) -> int:
    """The number of this process among the strategy's; the chief's is 0."""
    if not replica_context.spans_processes(strategy):
        return 0
    [first, *_] = strategy.experimental_local_results(
        strategy.experimental_distribute_values_from_function(
            lambda context: int(context.replica_id_in_sync_group)
        )
    )
    return int(first) // len(strategy.extended.worker_devices)


@contextlib.contextmanager
def _of_worker(callbacks, rank: int) -> Iterator[list]:
    """What a worker that is not the chief does of the callbacks."""
    own, changed = [], []
    with tempfile.TemporaryDirectory() as directory:
        for one in callbacks:
            # The attribute is tf.keras' way of saying so.
            if isinstance(one, _CHIEF_ONLY) or getattr(
                one, "_chief_worker_only", False
            ):
                continue
            if type(one) is keras.callbacks.BackupAndRestore:
                one = keras.callbacks.BackupAndRestore(
                    f"{os.fspath(one.backup_dir).rstrip('/')}_worker_{rank}",
                    one.save_freq,
                    one.double_checkpoint,
                    one.delete_checkpoint,
                )
            if isinstance(one, keras.callbacks.ModelCheckpoint):
                changed.append((one, one.filepath))
                one.filepath = os.path.join(
                    directory, os.path.basename(one.filepath)
                )
            own.append(one)
        try:
            yield own
        finally:
            for one, filepath in changed:
                one.filepath = filepath
