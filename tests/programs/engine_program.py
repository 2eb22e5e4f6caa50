"""What engines start: training that one device repeats.

`python -m tests.programs.engine_program GROUPS`. Prints one JSON line with what
this process holds at the end.
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_xshard

NUM_STEPS = 4


def data():
    """The global batches."""
    x = np.random.default_rng(3).normal(size=[NUM_STEPS * 16, 6])
    return x.astype("float32"), np.sin(x[:, :2]).astype("float32")


def model(groups=None):
    """A network whose clipping shows a gradient that is not reduced."""
    keras.utils.set_random_seed(1)
    network = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(64, "tanh"),
            keras.layers.Dense(2),
        ]
    )
    optimizer = tf_xshard.CrossShardOptimizer(
        keras.optimizers.Adam(0.1, global_clipnorm=0.5),
        group_assignment=groups,
        communication=tf_xshard.Communication(timeout_seconds=60),
    )
    network.compile(optimizer, "mse")
    return network


def weights(network):
    """All numbers that training has changed."""
    return [w.numpy().ravel().tolist() for w in network.trainable_weights]


def main(groups):
    tf_xshard.connect(60)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        network = model(json.loads(groups))
    x, y = data()
    with tf_xshard.multi_worker_fit():
        network.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    plan = tf_xshard.communication_plan(network)
    paths = sorted({one.path for one in plan.operations})
    result = [tf_xshard.rank(strategy), weights(network), paths]
    print("final", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
