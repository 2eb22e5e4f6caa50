"""Trains as a script for Horovod does; comments show Horovod's lines.

`python -m tf_xshard launch --workers 2 -m tf_xshard.examples.from_horovod`
replaces `horovodrun -np 2 python train.py`.
"""

import keras
import tensorflow as tf
from sklearn import datasets

import tf_xshard


def main():
    # hvd.init()
    tf_xshard.connect()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    # size = hvd.size()
    size = strategy.num_replicas_in_sync
    # keras.utils.set_random_seed(hvd.rank())
    keras.utils.set_random_seed(1)  # the same in all processes
    digits = datasets.load_digits()
    data = tf.data.Dataset.from_tensor_slices(
        ((digits.images / 16).astype("float32"), digits.target)
    )
    # data = data.shard(hvd.size(), hvd.rank()).shuffle(1797).batch(16)
    data = data.take(1792).shuffle(1797, seed=1).batch(16 * size)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((8, 8)),
                keras.layers.Flatten(),
                keras.layers.Dense(64, "relu"),
                keras.layers.Dense(10, "softmax"),
            ]
        )
        # hvd.DistributedOptimizer(
        #     Adam(0.001 * hvd.size()),
        #     compression=hvd.Compression.fp16,
        #     backward_passes_per_step=2,
        #     average_aggregated_gradients=True,
        # )
        optimizer = tf_xshard.TowerOptimizer(
            tf_xshard.CrossShardOptimizer(
                keras.optimizers.Adam(0.001 * size),
                communication=tf_xshard.Communication(dtype="float16"),
            ),
            num_towers=2,
        )
        model.compile(
            optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    # BroadcastGlobalVariablesCallback and MetricAverageCallback are not needed.
    # hvd.callbacks.LearningRateWarmupCallback(0.001 * hvd.size(), 2)
    warmup = tf_xshard.LearningRateWarmup(0.001 * size, 2)
    with tf_xshard.multi_worker_fit():
        history = model.fit(
            data, epochs=8, shuffle=False, verbose=0, callbacks=[warmup]
        )
    # if hvd.rank() == 0:
    if tf_xshard.is_chief(strategy):
        accuracy = history.history["accuracy"][-1]
        print(f"{size} replicas: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
