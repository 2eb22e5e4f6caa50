"""Keeps the callbacks of other workers from writing the chief's files."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence

import keras

from tf_xshard.private.keras import fit_internals

_CHIEF_ONLY = (
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


@contextlib.contextmanager
def of_worker(
    callbacks: Sequence[keras.callbacks.Callback], rank: int
) -> Iterator[Sequence[keras.callbacks.Callback]]:
    """Yields a worker's callbacks, which write none of the chief's files."""
    if rank == 0:
        yield callbacks
        return
    own: list[keras.callbacks.Callback] = []
    changed: list[tuple[keras.callbacks.ModelCheckpoint, str]] = []
    with tempfile.TemporaryDirectory() as directory:
        for one in callbacks:
            # A callback that was written for tf.keras may have an attribute
            # for "only on the chief". Keras 3 has no such attribute.
            if isinstance(
                one, _CHIEF_ONLY
            ) or fit_internals.is_for_the_chief_only(one):
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
