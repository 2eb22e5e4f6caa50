"""Models that are trained by optimizers with the same state inside."""

import atexit
import functools
import itertools
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import seeds
from tests.support import training

O = keras.optimizers  # noqa: E741
OPTIMIZERS = {
    "plain": lambda: O.Adam(0.05),
    "cross": lambda: tf_xshard.CrossShardOptimizer(O.Adam(0.05)),
    "sharded": lambda: tf_xshard.CrossShardOptimizer(
        O.Adam(0.05), shard_update=True
    ),
    "tower": lambda: tf_xshard.TowerOptimizer(O.Adam(0.05), 1),
    "towers": lambda: tf_xshard.CrossShardOptimizer(
        tf_xshard.TowerOptimizer(O.Adam(0.05), 1)
    ),
    "cross_scale": lambda: tf_xshard.CrossShardOptimizer(
        O.LossScaleOptimizer(O.Adam(0.05))
    ),
    "sharded_scale": lambda: tf_xshard.CrossShardOptimizer(
        O.LossScaleOptimizer(O.Adam(0.05)), shard_update=True
    ),
    "scale": lambda: O.LossScaleOptimizer(O.Adam(0.05)),
}
X = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)


def start(name, num_replicas=1):
    return start_with(OPTIMIZERS[name], num_replicas)


def start_with(optimizer_fn, num_replicas=1, is_built=True):
    seeds.seed(3)
    with replicas.mirrored(num_replicas).scope():
        model = keras.Sequential(
            [keras.layers.Input((3,)), keras.layers.Dense(3)]
        )
        model.compile(optimizer_fn(), "mse", auto_scale_loss=False)
        if is_built:
            model.optimizer.build(model.trainable_variables)
    return model


@functools.cache
def _target(name):
    return start(name, 2)


def target(name):
    """A model on two replicas, traced once, with a state that is no start."""
    model = _target(name)
    for variable in [*model.weights, *model.optimizer.variables]:
        variable.assign(np.full(variable.shape, 7))
    return model


def train(model, num_steps):
    training.run_steps(model, [(X, X)] * num_steps)
    return model.get_weights()


def iterations(model):
    return int(model.optimizer.iterations.numpy())


def kind(name):
    return "scale" in name


def checkpoint_of(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


between_all = pytest.mark.parametrize(
    "source, target",
    [
        (source, target)
        for source, target in itertools.permutations(OPTIMIZERS, 2)
        if kind(source) == kind(target)
    ],
)


@functools.cache
def saved_after_training(name):
    """Files of a model that was trained on two replicas, and what comes next.

    Returns:
      A file of weights, a checkpoint, and the weights after three more steps.
    """
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    model = start(name, 2)
    train(model, 3)
    weights = f"{directory.name}/model.weights.h5"
    model.save_weights(weights)
    checkpoint = checkpoint_of(model).save(f"{directory.name}/state")
    return weights, checkpoint, train(model, 3)


def check_equal(variables, others):
    for value, want in zip(variables, others, strict=True):
        np.testing.assert_array_equal(value.numpy(), want.numpy())


def check_it_goes_on(moved, expected):
    assert iterations(moved) == 3
    strategy = moved.distribute_strategy
    for variable in moved.optimizer.variables:
        # On all replicas, and not as they are created.
        first, *others = replicas.values(strategy, variable)
        assert len(others) + 1 == strategy.num_replicas_in_sync
        for other in others:
            np.testing.assert_array_equal(other, first)
    train(moved, 3)
    for variable, want in zip(moved.weights, expected, strict=True):
        for value in replicas.values(strategy, variable):
            np.testing.assert_allclose(value, want, atol=1e-6)
    assert iterations(moved) == 6


def two_towers():
    return tf_xshard.TowerOptimizer(O.Adam(0.05), 2)


def agn():
    return tf_xshard.AGNOptimizer(O.Adam(0.05), communication_period=2)


def open_round():
    model = start_with(two_towers)
    train(model, 3)
    return model
