"""Files that were written before the package had folders load ever after.

Version 0.1.0 wrote those of `saved_files` after three steps, alone and in
groups of one. `held.json` has all values that they hold.
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
    dense = keras.layers.Dense(1, name="dense")
    model = keras.Sequential([keras.layers.Input((3,)), dense], name="model")
    model.compile(OPTIMIZERS[name](groups), "mse")
    if is_built:
        model.optimizer.build(model.trainable_variables)
    model.set_weights([np.ones([3, 1]), np.zeros([1])])
    return model


def _check(model, held):
    """What each variable holds on all replicas."""
    variables = [*model.weights, *model.optimizer.variables]
    for one, values in zip(variables, held, strict=True):
        found = replicas.values(model.distribute_strategy, one)
        np.testing.assert_array_equal(found, np.asarray(values, one.dtype))


@pytest.mark.skipif(
    versions.KERAS < (3, 15),
    reason="the files are Keras 3.15's, whose layers have newer arguments",
)
@on_every_optimizer
def test_a_keras_file(name):
    loaded = keras.models.load_model(FILES / f"{name}.keras")
    assert type(loaded.optimizer) is type(OPTIMIZERS[name](None))
    _check(loaded, HELD[name]["one_device"])


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
    _check(model, HELD[name]["one_device"])


@on_every_optimizer
def test_a_group_state(name):
    with replicas.mirrored(2).scope():
        model = _model(name, [[0], [1]])
    state = tf_xshard.GroupState(model)
    assert state.restore(FILES / f"{name}_group_state") == (2, 1)
    held = HELD[name]["groups"]
    _check(model, held)
    # The test can fail: the groups hold different values.
    assert any(np.any(np.asarray(a) != np.asarray(b)) for a, b in held)


@on_every_optimizer
def test_a_config(name):
    config = json.loads((FILES / f"{name}.json").read_text())
    # Modules that are no more: the registered name is what counts.
    assert config["module"].count(".") == 1
    optimizer = keras.saving.deserialize_keras_object(config)
    now = keras.saving.serialize_keras_object(optimizer)

    def known(value, old):
        """Drops the arguments that version 0.1.0 did not know."""
        if not isinstance(old, dict):
            return value
        return {
            key: known(value[key], old[key])
            for key in old.keys() - {"module", "build_config"}
        }

    assert known(now, config) == known(config, config)
