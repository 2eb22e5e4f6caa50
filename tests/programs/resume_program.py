"""Trains two groups of two, is killed, and resumes in another process.

`python -m tests.programs.resume_program DIRECTORY killed|resumed`.
"resumed" also trains without interruption, and prints digests of all that both
hold.
"""

import hashlib
import json
import os
import signal
import sys

import keras
import tensorflow as tf

import tf_xshard
from tests.support import group_training
from tests.support import replicas

GROUPS = [[0, 2], [1, 3]]
NUM_EPOCHS = 3
STEPS_PER_EPOCH = 6
SAVED_AT = (1, 4)
_KILLED_AFTER = (1, 4)  # Epoch and batch, one behind the save.


class _Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == _KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)


def _model(strategy, seed):
    return group_training.compiled(strategy, groups=GROUPS, seed=seed)


def _fit(model, callbacks, epoch=0):
    """On a seeded pipeline, shuffled, that starts at an epoch."""
    keras.utils.set_random_seed(5)
    x, y = group_training.data(16 * STEPS_PER_EPOCH)
    dataset = (
        tf.data.Dataset.from_tensor_slices((x, y))
        .shuffle(1000, seed=5, reshuffle_each_iteration=False)
        .repeat()
        .batch(16)
        .skip(epoch * STEPS_PER_EPOCH)
    )
    history = model.fit(
        dataset,
        epochs=NUM_EPOCHS,
        steps_per_epoch=STEPS_PER_EPOCH,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return history.history["loss"]


def _digests(model):
    return [
        [hashlib.sha256(value.tobytes()).hexdigest() for value in values]
        for values in group_training.values(model)
    ]


def main(directory, case):
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 4,
    )
    strategy = replicas.mirrored(4)
    saves = os.path.join(directory, "saves")
    checkpoint = tf_xshard.GroupCheckpoint(saves, every=5)
    if case == "killed":
        _fit(_model(strategy, 1), [checkpoint, _Kill()])
    position = tf_xshard.GroupCheckpoint.position(saves)
    result, logs = {}, {}
    for name, callbacks, seed, epoch in (
        ("resumed", [checkpoint], 2, position.epoch),
        ("uninterrupted", [], 1, 0),
    ):
        model = _model(strategy, seed)
        logs[name] = _fit(model, callbacks, epoch)
        result[name] = _digests(model)
    print(json.dumps({**result, "logs": logs}))


if __name__ == "__main__":
    main(*sys.argv[1:])
