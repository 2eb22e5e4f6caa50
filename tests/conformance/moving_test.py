"""A running training moves into a wrapper, between wrappers, and back."""

import atexit
import functools
import itertools
import pickle
import tempfile
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas

O = keras.optimizers  # noqa: E741
OPTIMIZERS = {
    "plain": lambda: O.Adam(0.05),
    "cross": lambda: tf_xshard.CrossShardOptimizer(O.Adam(0.05)),
    "tower": lambda: tf_xshard.TowerOptimizer(O.Adam(0.05), 1),
    "towers": lambda: tf_xshard.CrossShardOptimizer(
        tf_xshard.TowerOptimizer(O.Adam(0.05), 1)
    ),
    "cross_scale": lambda: tf_xshard.CrossShardOptimizer(
        O.LossScaleOptimizer(O.Adam(0.05))
    ),
    "scale": lambda: O.LossScaleOptimizer(O.Adam(0.05)),
}
X = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)


def _model(name, num_replicas=1):
    return _model_of(OPTIMIZERS[name], num_replicas)


def _model_of(optimizer_fn, num_replicas=1, is_built=True):
    keras.utils.set_random_seed(3)
    with replicas.mirrored(num_replicas).scope():
        model = keras.Sequential(
            [keras.layers.Input((3,)), keras.layers.Dense(2)]
        )
        model.compile(optimizer_fn(), "mse", auto_scale_loss=False)
        if is_built:
            model.optimizer.build(model.trainable_variables)
    return model


def _fit(model, epochs):
    model.fit(
        X, X[:, :2], batch_size=8, epochs=epochs, shuffle=False, verbose=0
    )
    return model.get_weights()


def _iterations(model):
    return int(model.optimizer.iterations.numpy())


def _kind(name):
    return "scale" in name


def _checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


between_all = pytest.mark.parametrize(
    "source, target",
    [
        (source, target)
        for source, target in itertools.permutations(OPTIMIZERS, 2)
        if _kind(source) == _kind(target)
    ],
)


@functools.cache
def _trained(name):
    """Files of a model that was trained on two replicas, and what comes next.

    Returns:
      A file of weights, a checkpoint, and the weights after three more epochs.
    """
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    model = _model(name, 2)
    _fit(model, 3)
    weights = f"{directory.name}/model.weights.h5"
    model.save_weights(weights)
    checkpoint = _checkpoint(model).save(f"{directory.name}/state")
    return weights, checkpoint, _fit(model, 3)


def _check_it_goes_on(moved, expected):
    assert _iterations(moved) == 3
    strategy = moved.distribute_strategy
    for variable in moved.optimizer.variables:
        # On all replicas, and not as they are created.
        first, *others = replicas.values(strategy, variable)
        assert len(others) + 1 == strategy.num_replicas_in_sync
        for other in others:
            np.testing.assert_array_equal(other, first)
    _fit(moved, 3)
    for variable, want in zip(moved.weights, expected, strict=True):
        for value in replicas.values(strategy, variable):
            np.testing.assert_allclose(value, want, atol=1e-6)
    assert _iterations(moved) == 6


@between_all
def test_training_goes_on_as_if_nothing_had_moved(source, target):
    weights, _, expected = _trained(source)
    moved = _model(target, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved.load_weights(weights)
    _check_it_goes_on(moved, expected)


@between_all
def test_a_checkpoint_of_tensorflow(source, target):
    """Before and after the optimizer is built."""
    _, checkpoint, expected = _trained(source)
    for num_replicas, is_built in ((1, True), (2, False)):
        moved = _model_of(OPTIMIZERS[target], num_replicas, is_built)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _checkpoint(moved).restore(checkpoint).expect_partial()
            _check_it_goes_on(moved, expected)


def _two_towers():
    return tf_xshard.TowerOptimizer(O.Adam(0.05), 2)


def _agn():
    return tf_xshard.AGNOptimizer(O.Adam(0.05), communication_period=2)


def _open_round():
    model = _model_of(_two_towers)
    _fit(model, 3)
    return model


def test_an_open_round_moves_between_towers_and_is_named_elsewhere(tmp_path):
    path = tmp_path / "model.weights.h5"
    model = _open_round()
    model.save_weights(path)
    expected = _fit(model, 1)

    nested = _model_of(lambda: tf_xshard.CrossShardOptimizer(_two_towers()))
    nested.load_weights(path)
    for value, want in zip(_fit(nested, 1), expected, strict=True):
        np.testing.assert_allclose(value, want, atol=1e-6)

    cross = _model("cross")
    with pytest.warns(UserWarning, match="no place for 5 variables"):
        cross.load_weights(path)
    plain = _model("plain")
    plain.load_weights(path)
    for one in (cross, plain):
        assert _iterations(one) == 1
        momentum = one.optimizer.variables[2].numpy()
        assert np.abs(momentum).max() > 0

    towers = _model_of(_two_towers)
    other = _model("plain")
    other.save_weights(tmp_path / "plain.weights.h5")
    with pytest.warns(UserWarning, match="'TowerOptimizer'. start fresh"):
        towers.load_weights(tmp_path / "plain.weights.h5")


def test_into_and_out_of_agn(tmp_path):
    """The local optimizer's slots are those of the training."""
    path = tmp_path / "model.weights.h5"
    plain = _model("plain")
    _fit(plain, 3)
    plain.save_weights(path)
    agn = _model_of(_agn)
    with pytest.warns(UserWarning, match="AGNOptimizer.* start fresh|Skipping"):
        agn.load_weights(path)
    assert _iterations(agn) == 3
    for value, want in zip(
        agn.optimizer.local_optimizer.variables[2:],
        plain.optimizer.variables[2:],
        strict=True,
    ):
        np.testing.assert_array_equal(value.numpy(), want.numpy())
    agn.save_weights(path)
    back = _model("plain")
    back.load_weights(path)
    assert _iterations(back) == 3
    again = _model_of(_agn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_weights(path)
    for value, want in zip(
        again.optimizer.variables, agn.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(value.numpy(), want.numpy())


def test_a_whole_model_of_plain_keras(tmp_path):
    path = tmp_path / "model.keras"
    model = _model("plain")
    _fit(model, 3)
    model.save(path)
    moved = _model("cross")
    moved.load_weights(path)
    expected = _fit(model, 2)
    for value, want in zip(_fit(moved, 2), expected, strict=True):
        np.testing.assert_allclose(value, want, atol=1e-6)


@pytest.mark.parametrize("is_built", [True, False])
def test_an_open_round_in_a_checkpoint(is_built, tmp_path):
    model = _open_round()
    path = _checkpoint(model).save(tmp_path / "state")
    expected = _fit(model, 1)
    nested = _model_of(
        lambda: tf_xshard.CrossShardOptimizer(_two_towers()), 1, is_built
    )
    _checkpoint(nested).restore(path).expect_partial()
    for value, want in zip(_fit(nested, 1), expected, strict=True):
        np.testing.assert_allclose(value, want, atol=1e-6)

    cross = _model_of(OPTIMIZERS["cross"], 1, is_built)
    with pytest.warns(UserWarning, match="no place .*'TowerOptimizer'"):
        _checkpoint(cross).restore(path).expect_partial()
    cross.optimizer.build(cross.trainable_variables)
    assert _iterations(cross) == 1

    path = _checkpoint(_model("plain")).save(tmp_path / "plain")
    towers = _model_of(_two_towers, 1, is_built)
    with pytest.warns(UserWarning, match="'TowerOptimizer'. start fresh"):
        _checkpoint(towers).restore(path).expect_partial()
        _fit(towers, 1)


@pytest.mark.parametrize("is_built", [True, False])
def test_a_checkpoint_into_and_out_of_agn(is_built, tmp_path):
    plain = _model("plain")
    _fit(plain, 3)
    path = _checkpoint(plain).save(tmp_path / "plain")
    agn = _model_of(_agn, 1, is_built)
    with pytest.warns(UserWarning, match="'AGNOptimizer'. start fresh"):
        _checkpoint(agn).restore(path).expect_partial()
        agn.optimizer.build(agn.trainable_variables)
    assert _iterations(agn) == 3
    for value, want in zip(
        agn.optimizer.local_optimizer.variables[2:],
        plain.optimizer.variables[2:],
        strict=True,
    ):
        np.testing.assert_array_equal(value.numpy(), want.numpy())
    _fit(agn, 1)
    path = _checkpoint(agn).save(tmp_path / "agn")
    again = _model_of(_agn, 1, is_built)
    _checkpoint(again).restore(path).expect_partial()
    again.optimizer.build(again.trainable_variables)
    for value, want in zip(
        again.optimizer.variables, agn.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(value.numpy(), want.numpy())
    back = _model("plain")
    _checkpoint(back).restore(path).expect_partial()
    assert _iterations(back) == 4


def test_a_checkpoint_of_several_optimizers(tmp_path):
    """tf.train.Checkpoint does not follow a MultiOptimizer; wrappers do."""

    def maker():
        return tf_xshard.CrossShardOptimizer(
            O.MultiOptimizer(lambda _: O.Adam(0.05))
        )

    model = _model_of(maker)
    _fit(model, 3)
    path = _checkpoint(model).save(tmp_path / "state")
    expected = _fit(model, 1)
    again = _model_of(maker)
    _checkpoint(again).restore(path).assert_consumed()
    for value, want in zip(_fit(again, 1), expected, strict=True):
        np.testing.assert_array_equal(value, want)
    # Without a wrapper nothing has saved them.
    plain = _model_of(lambda: O.MultiOptimizer(lambda _: O.Adam(0.05)))
    path = _checkpoint(plain).save(tmp_path / "plain")
    with pytest.warns(UserWarning, match="'CrossShardOptimizer'. start fresh"):
        _checkpoint(_model_of(maker)).restore(path).expect_partial()
    # Keras' files have them.
    _fit(plain, 3)
    plain.save_weights(tmp_path / "plain.weights.h5")
    moved = _model_of(maker)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved.load_weights(tmp_path / "plain.weights.h5")
    for value, want in zip(_fit(moved, 1), _fit(plain, 1), strict=True):
        np.testing.assert_array_equal(value, want)


def test_pickling():
    for make in (*OPTIMIZERS.values(), _two_towers, _agn):
        optimizer = make()
        again = pickle.loads(pickle.dumps(optimizer))
        assert again.get_config() == optimizer.get_config()
    model = _open_round()
    again = pickle.loads(pickle.dumps(model))
    for value, want in zip(
        again.optimizer.variables, model.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(value.numpy(), want.numpy())
