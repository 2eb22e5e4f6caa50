"""Divides Muon's update over four replicas, by whole variables."""

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
                keras.layers.Dense(128, "gelu"),
                keras.layers.Dense(128, "gelu"),
                keras.layers.Dense(128, "gelu"),
                keras.layers.Dense(128, "gelu"),
                keras.layers.Dense(10, "softmax", name="classes"),
            ]
        )
        # Muon updates the last layer and all biases like AdamW.
        muon = keras.optimizers.Muon(1e-3, exclude_layers=["classes"])
        model.compile(
            tf_xshard.CrossShardOptimizer(muon, shard_update=shard_update),
            "sparse_categorical_crossentropy",
        )
    model.fit(images, labels, batch_size=64, epochs=2, shuffle=False, verbose=0)
    return model


def main():
    [cpu] = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    whole, sharded = train(strategy, False), train(strategy, True)
    pairs = zip(whole.get_weights(), sharded.get_weights(), strict=True)
    difference = max(np.abs(a - b).max() for a, b in pairs)
    print(f"The weights differ by {difference:.1e}")
    plans = [tf_xshard.communication_plan(one) for one in (whole, sharded)]
    print(
        f"A replica holds {plans[1].slot_bytes / 1000:.0f} kB of Muon's state"
        f" instead of {plans[0].slot_bytes / 1000:.0f} kB"
    )
    print(str(plans[1]).splitlines()[-1])


if __name__ == "__main__":
    main()
