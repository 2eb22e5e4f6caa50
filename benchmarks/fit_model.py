"""What benchmarks/fit_on_one_host.py trains, in Keras 2 as in Keras 3.

Nothing of this project is imported here: Horovod needs an older TensorFlow.
"""

import json
import time

import numpy as np
import tensorflow as tf

NUM_REPLICAS = 4
BATCH_SIZE = 32  # Of one replica.
STEPS_PER_EPOCH = 20
# Not counted: tracing, and the memory that is first used.
WARM_UP_EPOCHS = 1

SHAPES = {"dense": (1024,), "convolutional": (32, 32, 3)}  # Of an example.

layers = tf.keras.layers
LAYERS = {
    # 12.6 million parameters: communication and update count.
    "dense": lambda: [
        *(layers.Dense(1024, activation="relu") for _ in range(12)),
        layers.Dense(10),
    ],
    # 57 thousand: computing counts.
    "convolutional": lambda: [
        layers.Conv2D(32, 3, activation="relu"),
        layers.Conv2D(64, 3, strides=2, activation="relu"),
        layers.Conv2D(64, 3, strides=2, activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(10),
    ],
}


def model(name, optimizer):
    """A compiled model with the same initial weights wherever it is made."""
    made = tf.keras.Sequential([layers.Input(SHAPES[name]), *LAYERS[name]()])
    rng = np.random.default_rng(0)
    made.set_weights(
        [
            rng.normal(size=w.shape, scale=np.prod(w.shape[:-1]) ** -0.5)
            for w in made.get_weights()
        ]
    )
    made.compile(
        optimizer,
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return made


def examples(name):
    """An epoch's data, not yet batched."""
    rng = np.random.default_rng(1)
    number = NUM_REPLICAS * BATCH_SIZE * STEPS_PER_EPOCH
    x = rng.normal(size=(number, *SHAPES[name])).astype("float32")
    return tf.data.Dataset.from_tensor_slices(
        (x, rng.integers(0, 10, size=number))
    )


class StepSeconds(tf.keras.callbacks.Callback):
    """Seconds of a step, the average of an epoch, and the epochs' losses.

    From the first step's end to the last one's: how long an epoch takes to
    begin and to end does not count, since real ones have more steps.
    """

    def __init__(self, prints):
        super().__init__()
        self.prints = prints
        self.seconds, self.losses = [], []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self._first = time.perf_counter()
        self._last = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        passed = self._last - self._first
        self.seconds.append(passed / (STEPS_PER_EPOCH - 1))
        self.losses.append(float(logs["loss"]))

    def on_train_end(self, logs=None):
        """Prints what was found, for the program that has started this one."""
        found = {
            "seconds": self.seconds[WARM_UP_EPOCHS:],
            "losses": self.losses,
        }
        if self.prints:
            print("measured", json.dumps(found), flush=True)
