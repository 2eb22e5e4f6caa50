"""Trains Keras 2's models in two groups, and compares each with one device."""

import numpy as np
import tensorflow as tf
import tf_keras
from sklearn import datasets

import tf_xshard

GROUPS = [[0, 1], [2, 3]]


def train(strategy, images, labels, batch_size, wrap):
    """Trains a new model, and returns it."""
    tf_keras.utils.set_random_seed(0)
    with strategy.scope():
        model = tf_keras.Sequential(
            [
                tf_keras.layers.Flatten(input_shape=(8, 8)),
                tf_keras.layers.Dense(64, "tanh"),
                tf_keras.layers.Dense(10, "softmax"),
            ]
        )
        # tf_keras clips after the reduction, as on one device.
        adam = tf_keras.optimizers.Adam(1e-3, epsilon=1e-3, global_clipnorm=0.5)
        model.compile(wrap(adam), "sparse_categorical_crossentropy")
    model.fit(images, labels, batch_size, epochs=2, shuffle=False, verbose=0)
    return model


def main():
    [cpu] = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    digits = datasets.load_digits()
    images, labels = digits.images[:1408] / 16, digits.target[:1408]

    def wrap(optimizer):
        return tf_xshard.tf_keras.with_aggregator(optimizer, "mean", GROUPS)

    model = train(strategy, images, labels, 64, wrap)
    for number, members in enumerate(GROUPS):
        # `fit` gives each replica 16 of the 64 rows, in order.
        rows = images.reshape(-1, 4, 16, 8, 8)[:, members].reshape(-1, 8, 8)
        answers = labels.reshape(-1, 4, 16)[:, members].reshape(-1)
        alone = train(
            tf.distribute.get_strategy(), rows, answers, 32, lambda one: one
        )
        difference = max(
            np.abs(
                strategy.experimental_local_results(mine)[members[0]] - want
            ).max()
            for mine, want in zip(
                model.trainable_variables, alone.get_weights(), strict=True
            )
        )
        print(f"Group {number} differs from one device by {difference:.1e}")
    print(tf_xshard.communication_plan(model))


if __name__ == "__main__":
    main()
