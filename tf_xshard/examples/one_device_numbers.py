"""Trains digits on one device and on eight replicas, and compares the weights.

`python -m tf_xshard.examples.one_device_numbers --plot differences.png` also
draws the differences after each epoch.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from sklearn import datasets

import tf_xshard


def train(strategy, wrap=lambda optimizer: optimizer):
    """Trains a new model, and returns its weights after each epoch."""
    digits = datasets.load_digits()
    rows = (digits.images / 16).astype("float32"), digits.target
    data = tf.data.Dataset.from_tensor_slices(rows).take(1408).batch(64)
    options = tf.data.Options()
    options.autotune.enabled = False  # `fit` would wait for its threads
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((8, 8)),
                keras.layers.Flatten(),
                keras.layers.Dense(64, "relu"),
                keras.layers.Dense(10, "softmax"),
            ]
        )
        adam = keras.optimizers.Adam(3e-3, global_clipnorm=1.0)
        model.compile(wrap(adam), "sparse_categorical_crossentropy")
    data = data.with_options(options)
    weights = []
    for _ in range(8):
        model.fit(data, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    return weights


def differences(weights, reference):
    """Returns the largest difference of a weight after each epoch."""
    return [
        max(np.abs(a - b).max() for a, b in zip(*pair, strict=True))
        for pair in zip(weights, reference, strict=True)
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", metavar="FILE", help="save a picture")
    path = parser.parse_args().plot
    [cpu] = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * 8
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(8)])
    one = train(tf.distribute.get_strategy())
    plain = differences(train(strategy), one)
    wrapped = differences(train(strategy, tf_xshard.CrossShardOptimizer), one)
    print(f"plain Keras differs by         {plain[-1]:.1e}")
    print(f"CrossShardOptimizer differs by {wrapped[-1]:.1e}")
    if path:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 3.2))
        epochs = range(1, len(plain) + 1)
        axes.semilogy(epochs, plain, "o-", label="plain Keras, 8 replicas")
        axes.semilogy(epochs, wrapped, "s-", label="CrossShardOptimizer")
        axes.set(xlabel="epoch", ylabel="difference from one device")
        axes.legend(loc="center right")
        figure.savefig(path, dpi=100, bbox_inches="tight")


if __name__ == "__main__":
    main()
