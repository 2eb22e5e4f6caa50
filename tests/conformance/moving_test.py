"""A running training moves into a wrapper, between wrappers, and back."""

import pickle
import warnings

import numpy as np
import pytest

import tf_xshard
from tests.support import moving
from tests.support.versions import needs_multi_optimizer

O = moving.O  # noqa: E741
# By a file of weights, by tf.train.Checkpoint, and by one that is restored
# before the optimizer is built.
on_every_way = pytest.mark.parametrize("way", ["weights", "built", "unbuilt"])


def _save(model, way, path):
    if way == "weights":
        model.save_weights(f"{path}.weights.h5")
        return f"{path}.weights.h5"
    return moving.checkpoint_of(model).save(path)


def _loaded(optimizer_fn, path, way):
    """A model that has loaded a file, and the text of all warnings."""
    model = moving.start_with(optimizer_fn, is_built=way != "unbuilt")
    with warnings.catch_warnings(record=True, action="always") as warned:
        if way == "weights":
            model.load_weights(path)
        else:
            moving.checkpoint_of(model).restore(path).expect_partial()
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
    return model, [
        str(one.message) for one in warned if one.category is UserWarning
    ]


def _of_built(way):
    """The way for plain Keras, which restores what is built."""
    return "built" if way == "unbuilt" else way


def _check_next_step(model, expected, tolerance=0.0):
    for value, want in zip(moving.train(model, 1), expected, strict=True):
        np.testing.assert_allclose(value, want, rtol=0, atol=tolerance)


@moving.between_all
def test_training_goes_on_as_if_nothing_had_moved(source, target):
    weights, checkpoint, expected = moving.saved_after_training(source)
    with warnings.catch_warnings(action="error"):
        moved = moving.target(target)
        moved.load_weights(weights)
        moving.check_it_goes_on(moved, expected)
        moved = moving.target(target)
        moving.checkpoint_of(moved).restore(checkpoint).expect_partial()
        unbuilt = moving.start_with(
            moving.OPTIMIZERS[target], 2, is_built=False
        )
        moving.checkpoint_of(unbuilt).restore(checkpoint).expect_partial()
        with unbuilt.distribute_strategy.scope():
            unbuilt.optimizer.build(unbuilt.trainable_variables)
    moving.check_equal(unbuilt.optimizer.variables, moved.optimizer.variables)
    moving.check_it_goes_on(moved, expected)


@on_every_way
def test_an_open_round_moves_between_towers_and_is_named_elsewhere(
    way, tmp_path
):
    model = moving.open_round()
    path = _save(model, way, tmp_path / "towers")
    expected = moving.train(model, 1)
    nested, warned = _loaded(
        lambda: tf_xshard.CrossShardOptimizer(moving.two_towers()), path, way
    )
    assert not warned
    _check_next_step(nested, expected, 1e-6)

    cross, warned = _loaded(moving.OPTIMIZERS["cross"], path, way)
    lost = "for 5 of the file" if way == "weights" else "['TowerOptimizer']"
    assert any("no place for" in one and lost in one for one in warned)
    plain, _ = _loaded(moving.OPTIMIZERS["plain"], path, _of_built(way))
    for one in (cross, plain):
        assert moving.iterations(one) == 1
        assert np.abs(one.optimizer.variables[2].numpy()).max() > 0

    path = _save(moving.start("plain"), way, tmp_path / "plain")
    _, warned = _loaded(moving.two_towers, path, way)
    assert any("['TowerOptimizer'] start fresh" in one for one in warned)


@on_every_way
def test_into_and_out_of_agn(way, tmp_path):
    """The local optimizer's slots are those of the training."""
    plain = moving.start("plain")
    moving.train(plain, 3)
    path = _save(plain, way, tmp_path / "plain")
    agn, warned = _loaded(moving.agn, path, way)
    # A second warning would be Keras', of the center's optimizer.
    center = [agn.optimizer.inner_optimizer.name] * (way == "weights")
    [warning] = warned
    assert f"{['AGNOptimizer', *center]} start fresh" in warning
    assert moving.iterations(agn) == 3
    moving.check_equal(
        agn.optimizer.local_optimizer.variables[2:],
        plain.optimizer.variables[2:],
    )
    moving.train(agn, 1)
    path = _save(agn, way, tmp_path / "agn")
    again, warned = _loaded(moving.agn, path, way)
    assert not warned
    moving.check_equal(again.optimizer.variables, agn.optimizer.variables)
    back, _ = _loaded(moving.OPTIMIZERS["plain"], path, _of_built(way))
    assert moving.iterations(back) == 4


@needs_multi_optimizer
def test_a_checkpoint_of_several_optimizers(tmp_path):
    """tf.train.Checkpoint does not follow a MultiOptimizer; wrappers do."""
    multi = lambda: O.MultiOptimizer(lambda _: O.Adam(0.05))
    cross = lambda: tf_xshard.CrossShardOptimizer(multi())
    towers = lambda: tf_xshard.TowerOptimizer(multi(), 1)
    model = moving.start_with(cross)
    moving.train(model, 3)
    path = _save(model, "built", tmp_path / "state")
    expected = moving.train(model, 1)
    again = moving.start_with(cross)
    moving.checkpoint_of(again).restore(path).assert_consumed()
    _check_next_step(again, expected)
    # Any wrapper around it has them, so nothing is lost and nothing named.
    into_towers, warned = _loaded(towers, path, "built")
    path = _save(into_towers, "built", tmp_path / "towers")
    back, warned_too = _loaded(cross, path, "built")
    assert not warned + warned_too
    _check_next_step(into_towers, expected)
    _check_next_step(back, expected)
    # Without a wrapper nothing has saved them.
    plain = moving.start_with(multi)
    path = _save(plain, "built", tmp_path / "plain")
    _, warned = _loaded(cross, path, "built")
    assert any("['CrossShardOptimizer'] start fresh" in one for one in warned)
    # Keras' files have them.
    moving.train(plain, 3)
    path = _save(plain, "weights", tmp_path / "plain")
    moved, warned = _loaded(cross, path, "weights")
    assert not warned
    _check_next_step(moved, moving.train(plain, 1))


def test_a_whole_model_of_plain_keras(tmp_path):
    path = tmp_path / "model.keras"
    model = moving.start("plain")
    moving.train(model, 3)
    model.save(path)
    moved = moving.start("cross")
    moved.load_weights(path)
    _check_next_step(moved, moving.train(model, 1), 1e-6)


def test_pickling():
    for make in (*moving.OPTIMIZERS.values(), moving.two_towers, moving.agn):
        optimizer = make()
        again = pickle.loads(pickle.dumps(optimizer))
        assert again.get_config() == optimizer.get_config()
    model = moving.open_round()
    again = pickle.loads(pickle.dumps(model))
    moving.check_equal(again.optimizer.variables, model.optimizer.variables)
