"""Trains four models in one `fit`, and compares each with their ensemble."""

import tempfile

import keras
import tensorflow as tf
from sklearn import datasets

import tf_xshard


def main():
    [cpu] = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    digits = datasets.load_digits()
    images, labels = digits.images / 16, digits.target
    held_out = images[1408:], labels[1408:]

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
            # Each replica is a group: nothing is averaged, and each replica
            # trains its own model on its own quarter of the rows.
            tf_xshard.CrossShardOptimizer(
                keras.optimizers.Adam(3e-3),
                group_assignment=[[0], [1], [2], [3]],
            ),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    model.fit(images[:1408], labels[:1408], 64, epochs=5, verbose=0)

    groups = tf_xshard.GroupState(model)
    table = groups.evaluate(held_out)
    print(table)
    *accuracies, ensemble = table.column("accuracy")
    best = accuracies.index(max(accuracies))
    with tempfile.TemporaryDirectory() as directory:
        groups.export(best, f"{directory}/best.keras")
        # An ordinary Keras model, which needs no strategy and no tf_xshard.
        alone = keras.models.load_model(f"{directory}/best.keras")
    _, accuracy = alone.evaluate(*held_out, verbose=0)
    print(f"model {best} alone: {accuracy:.3f}, ensemble: {ensemble:.3f}")


if __name__ == "__main__":
    main()
