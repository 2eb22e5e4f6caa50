"""shard_update=True on four processes; called by multi_worker_program.py."""

import os

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tests.support import fitting
from tests.support import seeds
from tests.support import sharded
from tests.support import training
from tf_xshard.private.keras import shards as keras_shards

GROUPS = [[0, 2], [3, 1]]
NUM_STEPS = 2
COMMUNICATION = tf_xshard.Communication(timeout_seconds=120)


def adam():
    return keras.optimizers.Adam(0.05, global_clipnorm=0.1)


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


# The inner optimizer, and whether the update is in a tf.function.
MODES = {
    "momentum": (momentum, True),
    "adam": (adam, True),
    "eager": (momentum, False),
    "owned": (adafactor, True),
}


def run(strategy, directory, full):
    modes = MODES if full else ["momentum"]
    return {
        "steps": {name: _steps(strategy, *MODES[name]) for name in modes},
        "saved": _saved(strategy, directory, full),
        "alone": _alone(strategy),
    }


def _steps(strategy, inner_fn, graph):
    trained = sharded.Trained(
        inner_fn,
        strategy,
        GROUPS,
        graph,
        num_steps=NUM_STEPS,
        shard_update=True,
        communication=COMMUNICATION,
    )
    return {
        "weights": [w[0].tolist() for w in trained.weights],
        # All workers read them together.
        "slots": [v.numpy().tolist() for v in trained.slots()],
        "sizes": [
            v.layout.held_size
            if isinstance(v, keras_shards.Owned)
            # What this process holds.
            else int(v.shards.values[0].shape[0])
            for v in trained.slots()
        ],
    }


def _saved(strategy, directory, full):
    """Every worker saves; the chief's files are what is loaded.

    Returns:
      The weights after two more epochs: of the model itself, and of models that
      begin with what GroupState and, in full, `save` and callbacks have saved.
    """
    rank = tf_xshard.rank(strategy)

    def path(name):
        return os.path.join(directory, f"sharded_{name}")

    def start():
        return model(strategy, shard_update=True, communication=COMMUNICATION)

    callbacks = (
        lambda: tf_xshard.GroupCheckpoint(path("callback")),
        lambda: keras.callbacks.BackupAndRestore(
            path("backup"), delete_checkpoint=False
        ),
    )
    with tf_xshard.multi_worker_fit():
        trained = start()
        if full:
            best = keras.callbacks.ModelCheckpoint(path("best.keras"))
            every = [*(make() for make in callbacks), best]
            fitting.fit(trained, every, 3, data())
            trained.save(path(f"{rank}.keras"))
        else:
            train(trained, 3)
        tf.train.Checkpoint(model=trained, optimizer=trained.optimizer).write(
            path(f"{rank}_state")
        )
        tf_xshard.GroupState(trained).save(path("groups"))
        result = [train(trained, 2)]
        # Back to what the files hold.
        tf_xshard.GroupState(trained).restore(path("groups"))
        result.append(train(trained, 2))
        if not full:
            return result
        with strategy.scope():
            loaded = keras.saving.load_model(path(f"{rank}.keras"))
        result.append(train(loaded, 2))
        for make in callbacks:
            resumed = start()
            fitting.fit(resumed, [make()], 5, data())
            result.append(_weights(resumed))
    return result


def _alone(strategy):
    """Worker 2 reads what each holds a part of; then all of them do."""
    trained = sharded.Trained(
        momentum,
        strategy,
        num_steps=1,
        shard_update=True,
        communication=tf_xshard.Communication(timeout_seconds=2),
    )
    error = None
    if strategy.cluster_resolver.task_id == 2:
        try:
            trained.slots()[0].numpy()
        except RuntimeError as caught:
            error = str(caught)
    tf_xshard.barrier(strategy)
    return [error, trained.slots()[0].numpy().shape]
