"""shard_update=True on four processes; called by multi_worker_program.py."""

import os

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tests.support import seeds
from tests.support import sharded
from tests.support import training
from tf_xshard.private.keras import shards as keras_shards

GROUPS = [[0, 2], [3, 1]]
NUM_STEPS = 2
COMMUNICATION = tf_xshard.Communication(timeout_seconds=120)


def momentum():
    return keras.optimizers.SGD(0.5, momentum=0.5, clipnorm=0.1)


def adafactor():
    return keras.optimizers.Adafactor(0.05, clipnorm=0.1)


def model(strategy, **kwargs):
    seeds.seed(3)
    with strategy.scope():
        result = keras.Sequential(
            [keras.layers.Input((3,)), keras.layers.Dense(2)]
        )
        result.compile(
            tf_xshard.CrossShardOptimizer(momentum(), **kwargs), "mse"
        )
    return result


def data():
    x = np.linspace(-1, 1, 48, dtype="float32").reshape(16, 3)
    return x, x[:, :2]


def train(trained, num_steps):
    """Steps of all rows, as epochs of `fit` are; the weights after them."""
    training.run_steps(trained, [data()] * num_steps)
    return _weights(trained)


def _weights(trained):
    return [v.numpy().tolist() for v in trained.weights]


def run(strategy, directory):
    return {**_steps(strategy), "saved": _saved(strategy, directory)}


def _steps(strategy):
    """Weights and whole slots, which are on their owners only."""
    trained = sharded.Trained(
        adafactor,
        strategy,
        GROUPS,
        num_steps=NUM_STEPS,
        shard_update=True,
        communication=COMMUNICATION,
    )
    slots = trained.slots()
    assert all(isinstance(v, keras_shards.Owned) for v in slots)
    return {
        "weights": [w[0].tolist() for w in trained.weights],
        # All workers read them together.
        "slots": [v.numpy().tolist() for v in slots],
    }


def _saved(strategy, directory):
    """Every worker saves; the weights after two more epochs, twice."""
    trained = model(strategy, shard_update=True, communication=COMMUNICATION)
    train(trained, 3)
    checkpoint = tf.train.Checkpoint(model=trained, optimizer=trained.optimizer)
    rank = tf_xshard.rank(strategy)
    checkpoint.write(os.path.join(directory, f"sharded_{rank}_state"))
    path = os.path.join(directory, "sharded_groups")
    tf_xshard.GroupState(trained).save(path)
    result = [train(trained, 2)]
    # Back to what the files hold.
    tf_xshard.GroupState(trained).restore(path)
    return [*result, train(trained, 2)]
