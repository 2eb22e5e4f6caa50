"""Checks in little time that every supported version works.

`python -m tests.programs.version_matrix --smoke` runs these tests on each
supported Keras, with --full; the rest of the suite runs on the newest.
"""

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


def cross(inner, **kwargs):
    return tf_xshard.CrossShardOptimizer(inner, **kwargs)


def scaled(inner):
    return cross(O.LossScaleOptimizer(inner))


def sharded(inner):
    return cross(inner, shard_update=True)


def tower(inner, num_towers=1):
    return tf_xshard.TowerOptimizer(inner, num_towers)


def towers(inner):
    return tower(inner, 4)


def agn(inner):
    return tf_xshard.AGNOptimizer(inner, communication_period=1)


def sgd():
    return O.SGD(0.1)


def adam(**kwargs):
    return O.Adam(0.05, global_clipnorm=0.5, weight_decay=0.01, **kwargs)


def accumulating():
    return adam(gradient_accumulation_steps=4)


def average():
    """Overwriting the weights is in a tf.cond, where Keras calls merge_call."""
    return O.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)


def _model(make, strategy=None, policy=None):
    seeds.seed(1)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = keras.Sequential(
            [
                keras.layers.Input((3,)),
                keras.layers.Dense(4, activation="tanh", dtype=policy),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        model.compile(make(), "mse", auto_scale_loss=False)
    return model


def _fit(model, batch_size=8):
    model.fit(X, Y, batch_size, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def _check_replicas(model, expected, tolerance=1e-6):
    strategy = model.distribute_strategy
    for variable, want in zip(model.weights, expected, strict=True):
        for value in replicas.values(strategy, variable):
            np.testing.assert_allclose(value, want, atol=tolerance)


@pytest.mark.parametrize(
    "wrap, inner, kind, policy",
    [
        (cross, adam, "mirrored", None),
        (cross, adam, "mirrored", "mixed_bfloat16"),
        (sharded, adam, "mirrored", None),
        (tower, adam, "mirrored", None),
        (tower, adam, "tpu", None),
        # Four batches of four rows are one of 16; Keras' own way, too.
        (towers, adam, "mirrored", None),
        (cross, accumulating, "mirrored", None),
        (scaled, average, "mirrored", None),
        (tower, average, "mirrored", None),
        (sharded, average, "mirrored", None),
        (agn, sgd, "mirrored", None),
    ],
)
def test_fit_on_two_replicas(wrap, inner, kind, policy):
    is_accumulated = towers is wrap or inner is accumulating
    reference = _model(adam if is_accumulated else inner, policy=policy)
    expected = _fit(reference, 16 if is_accumulated else 8)
    model = _model(lambda: wrap(inner()), replicas.STRATEGIES[kind](2), policy)
    _fit(model, 4 if is_accumulated else 8)
    _check_replicas(model, expected, 1e-2 if policy else 1e-6)


@pytest.mark.parametrize("wrap", [cross, sharded, tower])
def test_an_overflow_on_one_replica(wrap):
    """In the first step, which all replicas skip."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = wrap(O.LossScaleOptimizer(O.SGD(1.0), 4.0))
        optimizer.build([weight])
    values = tf.constant([[1.0, np.inf], [1.0, 3.0]])

    @tf.function
    def step(row):
        def on_replica():
            loss = values[row, replicas.replica_id()] / 2
            optimizer.apply([optimizer.scale_loss(loss)], [weight])

        strategy.run(on_replica)

    for row, expected in enumerate((1.0, -1.0)):
        step(tf.constant(row))
        assert replicas.values(strategy, weight) == [expected] * 2


@pytest.mark.parametrize(
    "wrap, suffix",
    [(cross, ".keras"), (tower, ".weights.h5"), (sharded, ".ckpt")],
)
def test_save_and_load(wrap, suffix, tmp_path):
    make = lambda: _model(lambda: wrap(O.Adam(0.05)), replicas.mirrored(2))
    checkpoint = lambda one: tf.train.Checkpoint(
        model=one, optimizer=one.optimizer
    )
    model, other = make(), make()
    _fit(model)
    other.optimizer.build(other.trainable_variables)
    path = str(tmp_path / f"model{suffix}")
    if suffix == ".ckpt":
        path = checkpoint(model).write(path)
        checkpoint(other).read(path).assert_consumed()
    elif suffix == ".keras":
        model.save(path)
        with replicas.mirrored(2).scope():
            other = keras.models.load_model(path)
    else:
        model.save_weights(path)
        other.load_weights(path)
    _fit(other)
    _check_replicas(other, _fit(model))
