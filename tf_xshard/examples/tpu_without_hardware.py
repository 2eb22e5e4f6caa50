"""Trains on a simulated TPU (XLA:CPU), and compiles the step for a real one.

Needs the extra `[testing]`. Nothing here runs on a TPU.
"""

import keras
import numpy as np
from sklearn import datasets

import tf_xshard
from tf_xshard import testing


def main():
    # Before anything else uses TensorFlow.
    strategy = testing.simulated_tpu_strategy(4)
    digits = datasets.load_digits()
    images = (digits.images[:1408] / 16).astype("float32")
    labels = digits.target[:1408].astype(np.int32)
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
            tf_xshard.CrossShardOptimizer(
                keras.optimizers.Adam(3e-3), group_assignment=[[0, 1], [2, 3]]
            ),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    model.fit(images, labels, batch_size=64, epochs=4, verbose=0)
    print(tf_xshard.GroupState(model).evaluate((images, labels)))
    print(
        testing.compile_for_tpu(
            model, images[:64], labels[:64], topology="v5e:2x2"
        )
    )


if __name__ == "__main__":
    main()
