"""A running training moves into a wrapper, between wrappers, and back."""

import pickle
import warnings

import numpy as np
import pytest

import tf_xshard
from tests.support import moving


@moving.between_all
def test_training_goes_on_as_if_nothing_had_moved(source, target):
    weights, _, expected = moving.saved_after_training(source)
    moved = moving.target(target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved.load_weights(weights)
    moving.check_it_goes_on(moved, expected)


def test_an_open_round_moves_between_towers_and_is_named_elsewhere(tmp_path):
    path = tmp_path / "model.weights.h5"
    model = moving.open_round()
    model.save_weights(path)
    expected = moving.train(model, 1)

    nested = moving.start_with(
        lambda: tf_xshard.CrossShardOptimizer(moving.two_towers())
    )
    nested.load_weights(path)
    for value, want in zip(moving.train(nested, 1), expected, strict=True):
        np.testing.assert_allclose(value, want, atol=1e-6)

    cross = moving.start("cross")
    with pytest.warns(UserWarning, match="no place for 5 variables"):
        cross.load_weights(path)
    plain = moving.start("plain")
    plain.load_weights(path)
    for one in (cross, plain):
        assert moving.iterations(one) == 1
        momentum = one.optimizer.variables[2].numpy()
        assert np.abs(momentum).max() > 0

    towers = moving.start_with(moving.two_towers)
    other = moving.start("plain")
    other.save_weights(tmp_path / "plain.weights.h5")
    with pytest.warns(UserWarning, match="'TowerOptimizer'. start fresh"):
        towers.load_weights(tmp_path / "plain.weights.h5")


def test_into_and_out_of_agn(tmp_path):
    """The local optimizer's slots are those of the training."""
    path = tmp_path / "model.weights.h5"
    plain = moving.start("plain")
    moving.train(plain, 3)
    plain.save_weights(path)
    agn = moving.start_with(moving.agn)
    with pytest.warns(UserWarning) as warned:
        agn.load_weights(path)
    # Keras', of the center's optimizer, would be a second one.
    [warning] = warned
    center = agn.optimizer.inner_optimizer.name
    assert f"['AGNOptimizer', '{center}'] start fresh" in str(warning.message)
    assert moving.iterations(agn) == 3
    moving.check_equal(
        agn.optimizer.local_optimizer.variables[2:],
        plain.optimizer.variables[2:],
    )
    agn.save_weights(path)
    back = moving.start("plain")
    back.load_weights(path)
    assert moving.iterations(back) == 3
    again = moving.start_with(moving.agn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_weights(path)
    moving.check_equal(again.optimizer.variables, agn.optimizer.variables)


def test_a_whole_model_of_plain_keras(tmp_path):
    path = tmp_path / "model.keras"
    model = moving.start("plain")
    moving.train(model, 3)
    model.save(path)
    moved = moving.start("cross")
    moved.load_weights(path)
    expected = moving.train(model, 2)
    for value, want in zip(moving.train(moved, 2), expected, strict=True):
        np.testing.assert_allclose(value, want, atol=1e-6)


def test_pickling():
    for make in (*moving.OPTIMIZERS.values(), moving.two_towers, moving.agn):
        optimizer = make()
        again = pickle.loads(pickle.dumps(optimizer))
        assert again.get_config() == optimizer.get_config()
    model = moving.open_round()
    again = pickle.loads(pickle.dumps(model))
    moving.check_equal(again.optimizer.variables, model.optimizer.variables)
