"""Files that were written before the package had folders load ever after.

Version 0.1.0 wrote those of `saved_files` after three steps of `_train`, alone
and in groups of one. `held.json` has all values that they hold.
"""

import functools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import paths
from tests.support import replicas
from tests.support import versions

FILES = paths.ROOT / "tests" / "conformance" / "saved_files"
HELD = json.loads((FILES / "held.json").read_text())
X = np.arange(12, dtype="float32").reshape(4, 3) / 12
ADAM = functools.partial(keras.optimizers.Adam, 0.05)
# Adam has slots, the clipping function is a registered object of the config.
OPTIMIZERS = {
    "cross_shard": lambda groups: tf_xshard.CrossShardOptimizer(
        ADAM(),
        group_assignment=groups,
        pre_reduce=tf_xshard.clip_by_global_norm(5.0),
        communication=tf_xshard.Communication(timeout_seconds=60),
    ),
    "tower": lambda groups: tf_xshard.TowerOptimizer(
        tf_xshard.CrossShardOptimizer(ADAM(), group_assignment=groups),
        num_towers=2,
    ),
    "agn": lambda groups: tf_xshard.AGNOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.9),
        local_optimizer=ADAM(),
        communication_period=2,
        group_assignment=groups,
    ),
}
on_every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def _model(name, groups=None, is_built=True):
    """A model with fixed weights and an optimizer."""
    model = keras.Sequential(
        [keras.layers.Input((3,)), keras.layers.Dense(1, name="dense")],
        name="model",
    )
    model.compile(OPTIMIZERS[name](groups), "mse")
    if is_built:
        model.optimizer.build(model.trainable_variables)
    model.set_weights([np.ones([3, 1]), np.zeros([1])])
    return model


def _train(model, numbers):
    """Takes the steps of some numbers."""
    for number in numbers:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X * (1 + number)) - 1) ** 2)
        gradients = tape.gradient(loss, [v.value for v in model.weights])
        model.optimizer.apply(gradients, model.trainable_variables)


def _values(model):
    """What each variable holds on all replicas."""
    return [
        replicas.values(model.distribute_strategy, one)
        for one in (*model.weights, *model.optimizer.variables)
    ]


def _check(found, held, **tolerance):
    for mine, theirs in zip(found, held, strict=True):
        np.testing.assert_allclose(mine, theirs, **tolerance)


@pytest.mark.skipif(
    versions.KERAS < (3, 15),
    reason="the files are Keras 3.15's, whose layers have newer arguments",
)
@on_every_optimizer
def test_a_keras_file(name):
    loaded = keras.models.load_model(FILES / f"{name}.keras")
    assert type(loaded.optimizer) is type(OPTIMIZERS[name](None))
    _check(_values(loaded), HELD[name]["one_device"], rtol=0)
    # Training goes on from there. The fourth step ends a round of two towers
    # and a period of AGN, which the third has opened.
    fresh = _model(name)
    _train(fresh, range(4))
    _train(loaded, [3])
    _check(_values(loaded), _values(fresh), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "name, is_built", replicas.in_turn(OPTIMIZERS, [True, False])
)
def test_a_checkpoint(name, is_built):
    model = _model(name, is_built=is_built)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    status = checkpoint.read(str(FILES / f"{name}_checkpoint" / "state"))
    model.optimizer.build(model.trainable_variables)
    # Every object of the checkpoint has its place, and the other way round.
    status.assert_consumed()
    _check(_values(model), HELD[name]["one_device"], rtol=0)


@on_every_optimizer
def test_a_group_state(name):
    with replicas.mirrored(2).scope():
        model = _model(name, [[0], [1]])
    state = tf_xshard.GroupState(model)
    assert state.restore(FILES / f"{name}_group_state") == (2, 1)
    held = HELD[name]["groups"]
    _check(_values(model), held, rtol=0)
    # The test can fail: the groups hold different values.
    assert any(np.any(np.asarray(a) != np.asarray(b)) for a, b in held)


@on_every_optimizer
def test_a_config(name):
    config = json.loads((FILES / f"{name}.json").read_text())
    # Modules that are no more: the registered name is what counts.
    assert config["module"].count(".") == 1
    optimizer = keras.saving.deserialize_keras_object(config)
    now = keras.saving.serialize_keras_object(optimizer)

    def without_modules(value):
        if isinstance(value, dict):
            return {
                key: without_modules(one)
                for key, one in value.items()
                if key not in ("module", "build_config")
            }
        return value

    assert without_modules(now) == without_modules(config)
