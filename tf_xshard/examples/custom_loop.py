"""Writes the training loop by hand, with batches that replicas can't divide."""

import keras
import numpy as np
import tensorflow as tf
from sklearn import datasets

import tf_xshard

BATCH_SIZE = 64


def train(strategy):
    """Trains two epochs of 1,797 rows, whose last batch has 5 rows."""
    digits = datasets.load_digits()
    images = (digits.images / 16).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((images, digits.target))
    data = strategy.experimental_distribute_dataset(data.batch(BATCH_SIZE))
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
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.Adam(3e-3, global_clipnorm=1.0)
        )
        optimizer.build(model.trainable_variables)
        # Divides by the rows of all replicas.
        loss_fn = tf_xshard.GlobalMean("sparse_categorical_crossentropy")

    @tf.function(reduce_retracing=True)
    def step(images, labels):
        def on_replica(images, labels):
            with tf.GradientTape() as tape:
                loss = loss_fn(labels, model(images, training=True))
            variables = model.trainable_variables
            gradients = tape.gradient(loss, [v.value for v in variables])
            optimizer.apply(gradients, variables)
            return loss

        losses = strategy.run(on_replica, (images, labels))
        return strategy.reduce("sum", losses, axis=None)

    for epoch in range(2):
        losses = [step(*batch).numpy() for batch in data]
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")
    return model.get_weights()


def main():
    [cpu] = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(cpu, logical)
    print("One device:")
    one = train(tf.distribute.get_strategy())
    print("Four replicas:")
    devices = [f"CPU:{i}" for i in range(4)]
    four = train(tf.distribute.MirroredStrategy(devices))
    pairs = zip(one, four, strict=True)
    difference = max(np.abs(a - b).max() for a, b in pairs)
    print(f"The weights differ by {difference:.1e}")


if __name__ == "__main__":
    main()
