"""Averages four replicas' models every 10 steps instead of every gradient."""

import keras
import tensorflow as tf
from sklearn import datasets

import tf_xshard


def train(strategy, optimizer_fn):
    """Trains, and returns the accuracy and the bytes that each replica sent."""
    digits = datasets.load_digits()
    images, labels = digits.images / 16, digits.target
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
        model.compile(
            optimizer_fn(),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    ledger = tf_xshard.CommunicationLedger()
    model.fit(
        images[:1408],
        labels[:1408],
        batch_size=64,
        epochs=5,
        verbose=0,
        callbacks=[ledger],
    )
    # `fit` ends with an exchange, so all replicas hold the average.
    _, accuracy = model.evaluate(
        images[1408:1792], labels[1408:1792], batch_size=64, verbose=0
    )
    return accuracy, ledger.totals["communication_bytes_sent"]


def main():
    [cpu] = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    optimizers = {
        "every gradient": lambda: tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9)
        ),
        "local SGD, every 10 steps": lambda: tf_xshard.AGNOptimizer(
            keras.optimizers.SGD(1.0),  # the center takes the average update
            local_optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
            communication_period=10,
            accumulate="updates",
            normalize=False,
        ),
    }
    for name, optimizer_fn in optimizers.items():
        accuracy, sent = train(strategy, optimizer_fn)
        print(f"{name}: accuracy {accuracy:.3f}, {sent / 1e6:.2f} MB sent")


if __name__ == "__main__":
    main()
