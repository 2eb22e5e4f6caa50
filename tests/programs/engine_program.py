"""What engines start: training that one device repeats.

`python -m tests.programs.engine_program GROUPS TRANSPORT [--thread]`. Prints
one JSON line with what this process holds at the end.
"""

import json
import sys
from concurrent import futures

import keras
import numpy as np
import tensorflow as tf

import tf_xshard

NUM_STEPS = 4


def data():
    """The global batches."""
    x = np.random.default_rng(3).normal(size=[NUM_STEPS * 16, 6])
    return x.astype("float32"), np.sin(x[:, :2]).astype("float32")


def model(groups=None, transport="auto"):
    """A network whose clipping shows a gradient that is not reduced."""
    keras.utils.set_random_seed(1)
    network = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(64, "tanh"),
            keras.layers.Dense(2),
        ]
    )
    optimizer = keras.optimizers.Adam(0.1, global_clipnorm=0.5)
    network.compile(
        tf_xshard.CrossShardOptimizer(
            optimizer,
            group_assignment=groups,
            communication=tf_xshard.Communication(
                timeout_seconds=60, transport=transport
            ),
        ),
        "mse",
    )
    return network


def weights(network):
    """All numbers that training has changed."""
    return [w.numpy().ravel().tolist() for w in network.trainable_weights]


def main(groups, transport):
    tf_xshard.connect(60)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        network = model(json.loads(groups), transport)
    x, y = data()
    with tf_xshard.multi_worker_fit():
        history = network.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    plan = tf_xshard.communication_plan(network)
    result = [
        tf_xshard.rank(strategy),
        weights(network),
        history.history["loss"],
        sorted({one.path for one in plan.operations}),
    ]
    print("final", json.dumps(result), flush=True)


if __name__ == "__main__":
    if "--thread" in sys.argv:
        with futures.ThreadPoolExecutor(1) as pool:
            pool.submit(main, *sys.argv[1:3]).result()
    else:
        main(*sys.argv[1:])
