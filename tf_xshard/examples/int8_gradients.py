"""Sends gradients in 8 bits, with error feedback, a quarter of the bytes."""

import keras
import tensorflow as tf
from sklearn import datasets

import tf_xshard


def train(strategy, communication):
    """Trains, and returns the accuracy and the bytes that each replica sent."""
    digits = datasets.load_digits()
    images, labels = digits.images / 16, digits.target
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((8, 8)),
                keras.layers.Flatten(),
                keras.layers.Dense(256, "relu"),
                keras.layers.Dense(10, "softmax"),
            ]
        )
        model.compile(
            tf_xshard.CrossShardOptimizer(
                keras.optimizers.Adam(3e-3), communication=communication
            ),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    ledger = tf_xshard.CommunicationLedger()
    model.fit(
        images[:1408],
        labels[:1408],
        batch_size=64,
        epochs=4,
        verbose=0,
        callbacks=[ledger],
    )
    _, accuracy = model.evaluate(
        images[1408:1792], labels[1408:1792], batch_size=64, verbose=0
    )
    return accuracy, ledger.totals["communication_bytes_sent"]


def main():
    [cpu] = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    settings = {
        "float32": tf_xshard.Communication(),
        "bfloat16": tf_xshard.Communication(dtype="bfloat16"),
        "int8": tf_xshard.Communication(dtype="int8", error_feedback=True),
    }
    for name, communication in settings.items():
        accuracy, sent = train(strategy, communication)
        print(f"{name}: accuracy {accuracy:.3f}, {sent / 1e6:.1f} MB sent")


if __name__ == "__main__":
    main()
