"""shard_update=True on four processes; called by multi_worker_program.py."""

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tests.support import seeds
from tests.support import training
from tf_xshard.private.keras import shards as keras_shards

COMMUNICATION = tf_xshard.Communication(timeout_seconds=120)
OPTIMIZERS = {
    "sharded": lambda: keras.optimizers.SGD(0.5, momentum=0.5, clipnorm=0.1),
    # Slots are on their owners only.
    "owned": lambda: keras.optimizers.Adafactor(0.05, clipnorm=0.1),
}


def model(strategy, name, **kwargs):
    seeds.seed(3)
    with strategy.scope():
        result = keras.Sequential(
            [keras.layers.Input((3,)), keras.layers.Dense(2)]
        )
        result.compile(
            tf_xshard.CrossShardOptimizer(OPTIMIZERS[name](), **kwargs), "mse"
        )
    return result


def data():
    x = np.linspace(-1, 1, 48, dtype="float32").reshape(16, 3)
    return x, x[:, :2]


def train(trained, num_steps):
    """Steps of all rows, as epochs of `fit` are; the weights after them."""
    training.run_steps(trained, [data()] * num_steps)
    return [v.numpy().tolist() for v in trained.weights]


def sharded(strategy):
    return {name: _saved(strategy, name) for name in OPTIMIZERS}


def _saved(strategy, name):
    """Every worker saves; the weights after two more epochs, twice."""
    trained = model(
        strategy, name, shard_update=True, communication=COMMUNICATION
    )
    train(trained, 3)
    checkpoint = tf.train.Checkpoint(model=trained, optimizer=trained.optimizer)
    rank = tf_xshard.rank(strategy)
    checkpoint.write(f"{name}_{rank}_state")
    tf_xshard.GroupState(trained).save(f"{name}_groups")
    are_owned = [
        isinstance(v, keras_shards.Owned) for v in trained.optimizer.variables
    ]
    assert any(are_owned) == (name == "owned")
    result = [train(trained, 2)]
    # Back to what the files hold.
    tf_xshard.GroupState(trained).restore(f"{name}_groups")
    return [*result, train(trained, 2)]
