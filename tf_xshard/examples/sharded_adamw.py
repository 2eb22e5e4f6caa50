"""Divides AdamW's state over four replicas, with the weights unchanged."""

import math

import keras
import numpy as np
import tensorflow as tf
from sklearn import datasets

import tf_xshard


def train(strategy, shard_update):
    """Trains a new model, and returns it."""
    digits = datasets.load_digits()
    images, labels = digits.images[:1408] / 16, digits.target[:1408]
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((8, 8)),
                keras.layers.Flatten(),
                keras.layers.Dense(256, "gelu"),
                keras.layers.Dense(10, "softmax"),
            ]
        )
        adamw = keras.optimizers.AdamW(3e-3, global_clipnorm=1.0)
        model.compile(
            tf_xshard.CrossShardOptimizer(adamw, shard_update=shard_update),
            "sparse_categorical_crossentropy",
        )
    model.fit(images, labels, batch_size=64, epochs=4, shuffle=False, verbose=0)
    return model


def slot_numbers(model):
    """Counts the numbers of slot variables that one replica holds."""
    slots = [one for one in model.optimizer.variables if one.shape]
    return sum(
        one.layout.size if hasattr(one, "layout") else math.prod(one.shape)
        for one in slots
    )


def main():
    [cpu] = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    whole, sharded = train(strategy, False), train(strategy, True)
    pairs = zip(whole.get_weights(), sharded.get_weights(), strict=True)
    difference = max(np.abs(a - b).max() for a, b in pairs)
    print(f"The weights differ by {difference:.1e}")
    print(
        f"A replica holds {slot_numbers(sharded):,} numbers of AdamW's state"
        f" instead of {slot_numbers(whole):,}"
    )


if __name__ == "__main__":
    main()
