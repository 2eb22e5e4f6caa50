"""What is set, read or averaged on the wrapper is the inner optimizer's."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import filled
from tests.support import replicas
from tests.support import seeds
from tests.support import steps
from tests.support import versions
from tests.support.versions import needs_multi_optimizer

O = keras.optimizers  # noqa: E741
CROSS = tf_xshard.CrossShardOptimizer


def test_learning_rate():
    inner = O.SGD(0.5)
    optimizer = CROSS(inner)
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    assert float(inner.learning_rate) == 0.25
    scheduled = CROSS(O.SGD(O.schedules.ExponentialDecay(1.0, 3, 0.5)))
    assert float(scheduled.learning_rate) == 1.0
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        scheduled.learning_rate = 0.1


@needs_multi_optimizer
def test_multi_optimizer_has_optimizers_and_no_learning_rate():
    """AGN's are the local ones, whose rates callbacks set."""
    inner = O.MultiOptimizer(O.OptimizerMap(O.SGD(0.1)))
    agn = tf_xshard.AGNOptimizer(inner)
    agn.build([keras.Variable(1.0)])
    assert agn.optimizers == agn.local_optimizer.optimizers
    assert agn.optimizers != inner.optimizers
    cross = CROSS(agn.local_optimizer)
    assert cross.optimizers == agn.optimizers
    for optimizer in (cross, agn):
        assert not hasattr(optimizer, "learning_rate")
        with pytest.raises(AttributeError, match="on a MultiOptimizer"):
            optimizer.learning_rate = 0.1
    assert not hasattr(CROSS(O.SGD()), "optimizers")


@pytest.mark.parametrize("scaled", [False, True], ids=["", "loss_scale"])
def test_settings(scaled):
    for name, value in {
        "weight_decay": 0.1,
        "clipnorm": 1.0,
        "global_clipnorm": 2.0,
        "clipvalue": 3.0,
        "use_ema": True,
        "ema_momentum": 0.5,
        "ema_overwrite_frequency": 4,
        "loss_scale_factor": 8.0,
        "gradient_accumulation_steps": 2,
    }.items():
        inner = O.SGD(0.1)
        optimizer = CROSS(O.LossScaleOptimizer(inner) if scaled else inner)
        assert getattr(optimizer, name) == getattr(O.SGD(), name)
        setattr(optimizer, name, value)
        assert getattr(inner, name) == value
        assert getattr(optimizer, name) == value


def test_the_inner_optimizer_keeps_its_class_and_config():
    inner = O.Adam(0.1, clipnorm=1.0)
    config = inner.get_config()
    CROSS(inner)
    assert inner.__class__ is O.Adam
    assert inner.get_config() == config
    serialized = O.serialize(inner)
    assert serialized == O.serialize(O.Adam.from_config(dict(config)))


def test_ways_to_call_build_and_apply():
    optimizer = CROSS(O.LossScaleOptimizer(O.SGD(1.0), initial_scale=1.0))
    weight = keras.Variable(1.0)
    optimizer.apply([])
    assert not optimizer.built
    pairs = ((g, v) for g, v in [(tf.constant(1.0), weight)])
    assert int(optimizer.apply_gradients(pairs)) == 1
    names = [v.path for v in optimizer.variables]
    optimizer.build([weight])
    assert [v.path for v in optimizer.variables] == names
    optimizer.apply([tf.constant(0.25)])  # It is built: of all variables.
    assert float(weight) == -0.25
    with pytest.raises(ValueError, match="stateless_apply is not supported"):
        optimizer.stateless_apply([], [], [])


@pytest.mark.parametrize("make", [CROSS, tf_xshard.AGNOptimizer])
def test_exclude_from_weight_decay(make):
    """Each replica does so; the first builds it: Keras 3.16 refuses that."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        kernel = keras.Variable(1.0, name="kernel")
        bias = keras.Variable(1.0, name="bias")
        optimizer = make(O.SGD(1.0, weight_decay=0.5))

    def on_replica():
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        optimizer.apply([tf.constant(0.0)] * 2, [kernel, bias])

    if versions.KERAS >= (3, 16):
        with pytest.raises(ValueError, match="before the optimizer is built"):
            strategy.run(on_replica)
        return
    strategy.run(on_replica)
    assert replicas.values(strategy, kernel) == [0.5, 0.5]
    assert replicas.values(strategy, bias) == [1.0, 1.0]


class Doubling(O.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(2 * g, v) for g, v in grads_and_vars])


def test_an_inner_apply_gradients_is_called():
    [values] = steps.stepped(
        lambda: CROSS(Doubling(1.0)),
        lambda r: [tf.constant(1.0 + r)],
        num_replicas=2,
    )
    assert values == [-6.0, -6.0]


def test_constraints_and_overwrite_with_gradient():
    """An overwritten variable gets the group's mean."""
    strategy = replicas.mirrored(4)
    with strategy.scope():
        positive, scale = keras.Variable(1.0), keras.Variable(0.0)
        positive.constraint = keras.constraints.NonNeg()
        scale.overwrite_with_gradient = True
        optimizer = CROSS(O.SGD(1.0), "sum", [[0, 1], [2, 3]])
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [tf.constant(0.5), tf.constant(float(r))],
        [positive, scale],
    )
    assert replicas.values(strategy, positive) == [0.0] * 4
    assert replicas.values(strategy, scale) == [0.5, 0.5, 2.5, 2.5]


def _averaging():
    return O.SGD(0.1, use_ema=True, ema_momentum=0.5)


def _agn():
    return tf_xshard.AGNOptimizer(_averaging(), communication_period=2)


def _sharded():
    return CROSS(_averaging(), shard_update=True)


def _swapping(make):
    """A model, and the callback as `fit` sets it up."""
    model = filled.model(make, replicas.mirrored(2))
    callback = keras.callbacks.SwapEMAWeights()
    callback.set_model(model)
    return model, callback


@pytest.mark.parametrize(
    "make",
    [
        lambda: CROSS(O.LossScaleOptimizer(_averaging())),
        lambda: tf_xshard.TowerOptimizer(_averaging(), 1),
    ],
    ids=["through_a_loss_scale_optimizer", "tower"],
)
def test_swapped(make):
    """`evaluate` sees the averages on all replicas, and training does not."""
    model, callback = _swapping(make)
    filled.fill(model)
    variables = model.optimizer.variables
    averages = [v.numpy() for v in variables if "average" in v.path]
    weights = model.get_weights()
    callback.on_test_begin()
    filled.check(model, averages, lambda one: one.weights)
    callback.on_test_end()
    filled.check(model, weights, lambda one: one.weights)


@pytest.mark.parametrize(
    "make, error",
    [
        (_agn, "AGNOptimizer"),
        (lambda: tf_xshard.TowerOptimizer(_agn(), 1), "AGNOptimizer"),
        (_sharded, "shard of the averages"),
    ],
)
def test_refuses_to_swap_them(make, error):
    _, callback = _swapping(make)
    with pytest.raises(ValueError, match=f"SwapEMAWeights can't .*{error}"):
        callback.on_test_begin()


@versions.needs_optimizer("ScheduleFreeAdamW")
def test_an_optimizer_that_copies_weights_when_fit_builds_the_model():
    """Its momentum begins as the weights, which must exist by then."""
    x = np.linspace(-1, 1, 40, dtype="float32").reshape(8, 5)
    weights = []
    for first in ([], [keras.layers.Input((5,))]):
        seeds.seed(1)
        dense = keras.layers.Dense(3, kernel_initializer="he_normal")
        model = keras.Sequential([*first, dense])
        model.compile(CROSS(O.ScheduleFreeAdamW(0.1)), "mse")
        model.fit(x, x[:, :3], batch_size=4, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for value, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-7)
