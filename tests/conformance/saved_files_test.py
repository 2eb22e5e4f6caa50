"""Files that were written before the package had folders load ever after."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.programs import write_saved_files as written
from tests.support import paths
from tests.support import replicas
from tests.support import versions

FILES = paths.ROOT / "tests" / "conformance" / "saved_files"
HELD = json.loads((FILES / "held.json").read_text())
on_every_optimizer = pytest.mark.parametrize("name", written.OPTIMIZERS)


def _check(found, held):
    """The same values, of every variable on every replica."""
    assert len(found) == len(held)
    for mine, theirs in zip(found, held, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.skipif(
    versions.KERAS < (3, 15),
    reason="the files are Keras 3.15's, whose layers have newer arguments",
)
@on_every_optimizer
def test_a_keras_file(name):
    loaded = keras.models.load_model(FILES / f"{name}.keras")
    assert type(loaded.optimizer) is type(written.OPTIMIZERS[name](None))
    _check(written.values(loaded), HELD[name]["one_device"])
    # Training goes on from there: the fourth step ends the open round.
    fresh = written.compiled(name)
    written.train(fresh, num_steps=4)
    written.train(loaded, num_steps=1, first=3)
    for mine, theirs in zip(
        written.values(loaded), written.values(fresh), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "name, is_built", replicas.in_turn(written.OPTIMIZERS, [True, False])
)
def test_a_checkpoint(name, is_built):
    model = written.compiled(name, is_built=is_built)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    status = checkpoint.read(str(FILES / f"{name}_checkpoint" / "state"))
    model.optimizer.build(model.trainable_variables)
    # Every object of the checkpoint has its place, and the other way round.
    status.assert_consumed()
    _check(written.values(model), HELD[name]["one_device"])


@on_every_optimizer
def test_a_group_state(name):
    model = written.compiled(name, replicas.mirrored(2))
    state = tf_xshard.GroupState(model)
    assert state.restore(FILES / f"{name}_group_state") == (2, 1)
    held = HELD[name]["groups"]
    _check(written.values(model), held)
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
