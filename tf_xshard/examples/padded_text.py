"""Trains on padded text, where replicas have different numbers of tokens."""

import keras
import numpy as np
import tensorflow as tf
from sklearn import datasets

import tf_xshard

LENGTH = 80


def lines():
    """Returns lines of text as rows of bytes, padded with 0."""
    text = datasets.load_iris().DESCR + datasets.load_wine().DESCR
    found = [one.encode("ascii", "ignore") for one in text.splitlines()]
    found = sorted(one[:LENGTH] for one in found if len(one) > 1)
    rows = np.zeros([len(found), LENGTH], np.int32)
    for row, line in zip(rows, found, strict=True):
        row[: len(line)] = list(line)
    return rows


def train(strategy, loss):
    """Predicts each next byte, and returns the trained weights."""
    rows = lines()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((LENGTH - 1,), dtype="int32"),
                keras.layers.Embedding(128, 16, mask_zero=True),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(128, activation="softmax"),
            ]
        )
        model.compile(
            tf_xshard.CrossShardOptimizer(
                keras.optimizers.SGD(0.1, momentum=0.9)
            ),
            loss=loss,
        )
    # The mask of the embedding leaves out what follows padding.
    model.fit(
        rows[:, :-1],
        rows[:, 1:],
        batch_size=32,
        epochs=4,
        shuffle=False,
        verbose=0,
    )
    return model.get_weights()


def main():
    [cpu] = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    loss = "sparse_categorical_crossentropy"
    one = train(tf.distribute.get_strategy(), loss)
    losses = {"Keras's loss": loss, "GlobalMean": tf_xshard.GlobalMean(loss)}
    for name, used in losses.items():
        pairs = zip(one, train(strategy, used), strict=True)
        difference = max(np.abs(a - b).max() for a, b in pairs)
        print(f"{name} differs from one device by {difference:.1e}")


if __name__ == "__main__":
    main()
