"""Checks in little time that every supported version works.

`python -m tests.programs.version_matrix --smoke` runs these tests on each
supported Keras, with --full; the rest of the suite runs on the newest.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import seeds

O = keras.optimizers  # noqa: E741
X = np.linspace(-1, 1, 48, dtype="float32").reshape(16, 3)
Y = X.sum(1, keepdims=True)
pytestmark = pytest.mark.full
WRAPPERS = {
    "cross": tf_xshard.CrossShardOptimizer,
    "sharded": lambda inner: tf_xshard.CrossShardOptimizer(
        inner, shard_update=True
    ),
    "tower": lambda inner: tf_xshard.TowerOptimizer(inner, 1),
}


def _model(optimizer_fn, strategy=None, policy=None):
    seeds.seed(1)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = keras.Sequential(
            [
                keras.layers.Input((3,)),
                keras.layers.Dense(4, activation="tanh", dtype=policy),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        model.compile(optimizer_fn(), "mse", auto_scale_loss=False)
    return model


def _fit(model, batch_size=8, epochs=2):
    model.fit(X, Y, batch_size, epochs, shuffle=False, verbose=0)
    return model.get_weights()


@functools.cache
def _expected(optimizer_fn, batch_size=8):
    """The weights of one device."""
    return _fit(_model(optimizer_fn), batch_size)


def _adam():
    return O.Adam(0.05, global_clipnorm=0.5, weight_decay=0.01)


def _moving_average():
    return O.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)


def _check_replicas(model, expected, tolerance=1e-6):
    strategy = model.distribute_strategy
    for variable, want in zip(model.weights, expected, strict=True):
        for value in replicas.values(strategy, variable):
            np.testing.assert_allclose(value, want, atol=tolerance)


def _check_fit(optimizer_fn, expected, batch_size=8, kind="mirrored"):
    model = _model(optimizer_fn, replicas.STRATEGIES[kind](2))
    _fit(model, batch_size)
    _check_replicas(model, expected)


@pytest.mark.parametrize(
    "name, kind", [*((name, "mirrored") for name in WRAPPERS), ("tower", "tpu")]
)
def test_fit_on_two_replicas(name, kind):
    _check_fit(lambda: WRAPPERS[name](_adam()), _expected(_adam), kind=kind)


@pytest.mark.parametrize("name", WRAPPERS)
def test_mixed_precision(name):
    """With an overflow on one replica, in the first step."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = WRAPPERS[name](O.LossScaleOptimizer(O.SGD(1.0), 4.0))
        optimizer.build([weight])
    values = tf.constant([[1.0, np.inf], [1.0, 3.0]])

    @tf.function
    def step(row):
        def on_replica():
            loss = values[row, replicas.replica_id()] / 2
            gradient = optimizer.scale_loss(loss)
            optimizer.apply([gradient], [weight])

        strategy.run(on_replica)

    step(tf.constant(0))
    assert replicas.values(strategy, weight) == [1.0, 1.0]
    step(tf.constant(1))
    assert replicas.values(strategy, weight) == [-1.0, -1.0]


def test_mixed_bfloat16():
    """Of the change, a hundredth: bfloat16 has 8 bits."""
    adam = lambda: O.Adam(0.05)
    start = _model(adam).get_weights()
    expected = _fit(_model(adam, policy="mixed_bfloat16"))
    model = _model(
        lambda: tf_xshard.CrossShardOptimizer(adam()),
        replicas.mirrored(2),
        "mixed_bfloat16",
    )
    _fit(model)
    change = max(
        np.abs(one - first).max()
        for one, first in zip(expected, start, strict=True)
    )
    assert change > 0.1
    _check_replicas(model, expected, change / 100)


def test_accumulation():
    """Four towers of four rows are a batch of 16; Keras' own way, too."""
    adam = lambda **kwargs: O.Adam(0.05, **kwargs)
    for make in (
        lambda: tf_xshard.TowerOptimizer(adam(), 4),
        lambda: tf_xshard.CrossShardOptimizer(
            adam(gradient_accumulation_steps=4)
        ),
    ):
        _check_fit(make, _expected(adam, batch_size=16), batch_size=4)


@pytest.mark.parametrize(
    "name, scaled", [("cross", True), ("tower", False), ("sharded", True)]
)
def test_moving_average(name, scaled):
    """Overwriting the weights is in a tf.cond, where Keras calls merge_call."""
    scale = O.LossScaleOptimizer if scaled else lambda inner: inner
    _check_fit(
        lambda: WRAPPERS[name](scale(_moving_average())),
        _expected(_moving_average),
    )


@pytest.mark.parametrize(
    "name, suffix",
    [("cross", ".keras"), ("tower", ".weights.h5"), ("sharded", "checkpoint")],
)
def test_save_and_load(name, suffix, tmp_path):
    make = lambda: _model(
        lambda: WRAPPERS[name](O.Adam(0.05)), replicas.mirrored(2)
    )
    checkpoint = lambda one: tf.train.Checkpoint(
        model=one, optimizer=one.optimizer
    )
    model, other = make(), make()
    _fit(model)
    other.optimizer.build(other.trainable_variables)
    path = str(tmp_path / f"model{suffix}")
    if suffix == ".keras":
        model.save(path)
        with replicas.mirrored(2).scope():
            other = keras.models.load_model(path)
    elif suffix == "checkpoint":
        path = checkpoint(model).write(path)
        checkpoint(other).read(path).assert_consumed()
    else:
        model.save_weights(path)
        other.load_weights(path)
    _fit(other)
    _check_replicas(other, _fit(model))


def test_agn():
    """With a period of 1 and SGD, it is one device."""
    sgd = lambda: O.SGD(0.1)
    _check_fit(
        lambda: tf_xshard.AGNOptimizer(sgd(), communication_period=1),
        _expected(sgd),
    )
