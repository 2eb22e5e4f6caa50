"""Trains on several processes, and resumes after a crash.

`python -m tf_xshard launch --workers 2 -m tf_xshard.examples.many_workers`
starts two processes. Without `launch`, one process trains alone.
"""

import argparse

import keras
import tensorflow as tf
from sklearn import datasets

import tf_xshard


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--directory", help="shared by all processes; resumes from its save"
    )
    options = parser.parse_args()
    tf_xshard.connect()  # Slurm, MPI, torchrun; before the strategy
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    digits = datasets.load_digits()
    images, labels = digits.images[:1408] / 16, digits.target[:1408]
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
            tf_xshard.CrossShardOptimizer(keras.optimizers.Adam(3e-3)),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    callbacks = []
    if options.directory:
        callbacks.append(tf_xshard.GroupCheckpoint(options.directory))
    with tf_xshard.multi_worker_fit():
        history = model.fit(
            images,
            labels,
            batch_size=64,  # of all processes together
            epochs=8,
            verbose=0,
            callbacks=callbacks,
        )
    if tf_xshard.is_chief(strategy):
        accuracy = history.history["accuracy"][-1]
        print(
            f"{strategy.num_replicas_in_sync} replicas: accuracy {accuracy:.3f}"
        )


if __name__ == "__main__":
    main()
