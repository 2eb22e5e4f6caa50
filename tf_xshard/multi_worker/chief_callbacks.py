"""Callbacks that write files, where several processes train one model."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence

import keras

_CHIEF_ONLY = (
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


@contextlib.contextmanager
def of_worker(
    callbacks: Sequence[keras.callbacks.Callback], rank: int
) -> Iterator[Sequence[keras.callbacks.Callback]]:
    """Those of the callbacks that a worker calls, so that none is in the way.

    Args:
      callbacks: What the user gave.
      rank: The worker's number. The chief's is 0.

    Yields:
      The worker's. Until this is left, some write to other places.
    """
    if rank == 0:
        yield callbacks
        return
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
