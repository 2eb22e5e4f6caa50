"""Trains two groups of two, and is killed.

`python -m tests.programs.resume_program DIRECTORY`. The test resumes in its own
process, with the same pipeline.
"""

import os
import signal
import sys

import keras
import tensorflow as tf

import tf_xshard
from tests.support import group_training
from tests.support import replicas

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


def train(callbacks, seed, epoch=0):
    """On a seeded pipeline, shuffled, that starts at an epoch.

    Returns:
      The model and the losses.
    """
    # Also with `--gpu`: the program that is killed trains on CPUs.
    strategy = replicas.mirrored(4, "CPU")
    model = group_training.compiled(strategy, seed=seed)
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
    return model, history.history["loss"]


if __name__ == "__main__":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 4,
    )
    # As in the process of the tests: `shuffle` depends on it.
    tf.random.set_seed(1)
    train([tf_xshard.GroupCheckpoint(sys.argv[1], every=5), _Kill()], seed=1)
