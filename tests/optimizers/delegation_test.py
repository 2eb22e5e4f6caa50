"""What is set or read on the wrapper is the inner optimizer's."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import steps
from tests.support import training
from tests.support import versions
from tests.support.versions import needs_multi_optimizer

O = keras.optimizers  # noqa: E741


def _fit(model, **kwargs):
    x, y = training.data()
    return model.fit(x, y, batch_size=64, verbose=0, shuffle=False, **kwargs)


def test_learning_rate():
    inner = O.SGD(0.5)
    optimizer = tf_xshard.CrossShardOptimizer(inner)
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    assert float(inner.learning_rate) == 0.25
    scheduled = tf_xshard.CrossShardOptimizer(
        O.SGD(O.schedules.PiecewiseConstantDecay([1], [1.0, 2.0]))
    )
    assert float(scheduled.learning_rate) == 1.0
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        scheduled.learning_rate = 0.1


@needs_multi_optimizer
def test_multi_optimizer_has_optimizers_and_no_learning_rate():
    inner = O.MultiOptimizer(O.OptimizerMap(O.SGD(0.1)))
    optimizer = tf_xshard.CrossShardOptimizer(inner)
    assert optimizer.optimizers == inner.optimizers
    assert not hasattr(optimizer, "learning_rate")
    assert not hasattr(tf_xshard.CrossShardOptimizer(O.SGD()), "optimizers")


@pytest.mark.parametrize(
    "name, value",
    [
        ("weight_decay", 0.1),
        ("clipnorm", 1.0),
        ("global_clipnorm", 2.0),
        ("clipvalue", 3.0),
        ("use_ema", True),
        ("ema_momentum", 0.5),
        ("ema_overwrite_frequency", 4),
        ("loss_scale_factor", 8.0),
        ("gradient_accumulation_steps", 2),
    ],
)
@pytest.mark.parametrize("scaled", [False, True], ids=["", "loss_scale"])
def test_settings(name, value, scaled):
    inner = O.SGD(0.1)
    optimizer = tf_xshard.CrossShardOptimizer(
        O.LossScaleOptimizer(inner) if scaled else inner
    )
    assert getattr(optimizer, name) == getattr(O.SGD(), name)
    setattr(optimizer, name, value)
    assert getattr(inner, name) == value
    assert getattr(optimizer, name) == value


def test_the_inner_optimizer_keeps_its_class_and_config():
    inner = O.Adam(0.1, clipnorm=1.0)
    config = inner.get_config()
    tf_xshard.CrossShardOptimizer(inner)
    assert inner.__class__ is O.Adam
    assert inner.get_config() == config
    serialized = O.serialize(inner)
    assert serialized == O.serialize(O.Adam.from_config(dict(config)))


def test_iterations_count_updates_on_all_replicas():
    strategy = replicas.mirrored(2)
    model, _ = training.train(
        lambda: tf_xshard.CrossShardOptimizer(
            O.SGD(gradient_accumulation_steps=2)
        ),
        strategy,
        num_steps=6,
    )
    inner = model.optimizer.inner_optimizer
    assert replicas.values(strategy, inner._iterations) == [6, 6]
    assert int(model.optimizer.iterations) == 3


def test_ways_to_call_apply():
    optimizer = tf_xshard.CrossShardOptimizer(O.SGD(1.0))
    weight = keras.Variable(1.0)
    optimizer.apply([])
    assert not optimizer.built
    pairs = ((g, v) for g, v in [(tf.constant(1.0), weight)])
    assert int(optimizer.apply_gradients(pairs)) == 1
    optimizer.apply([tf.constant(0.25)])  # It is built: of all variables.
    assert float(weight) == -0.25
    with pytest.raises(ValueError, match="stateless_apply is not supported"):
        optimizer.stateless_apply([], [], [])


def test_build_is_idempotent():
    optimizer = tf_xshard.CrossShardOptimizer(O.LossScaleOptimizer(O.Adam()))
    weight = keras.Variable(1.0)
    optimizer.build([weight])
    names = [v.path for v in optimizer.variables]
    optimizer.build([weight])
    assert [v.path for v in optimizer.variables] == names


def test_exclude_from_weight_decay():
    optimizer = tf_xshard.CrossShardOptimizer(O.SGD(1.0, weight_decay=0.5))
    kernel = keras.Variable(1.0, name="kernel")
    bias = keras.Variable(1.0, name="bias")
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.apply([tf.constant(0.0)] * 2, [kernel, bias])
    assert (float(kernel), float(bias)) == (0.5, 1.0)


@pytest.mark.parametrize(
    "make", [tf_xshard.CrossShardOptimizer, tf_xshard.AGNOptimizer]
)
def test_each_replica_excludes_from_weight_decay(make):
    """When the second does, the first has built it: Keras 3.16 refuses that."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        bias = keras.Variable(1.0, name="bias")
        optimizer = make(O.SGD(1.0, weight_decay=0.5))

    def on_replica():
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        optimizer.apply([tf.constant(0.0)], [bias])

    if versions.KERAS >= (3, 16):
        with pytest.raises(ValueError, match="before the optimizer is built"):
            strategy.run(on_replica)
    else:
        strategy.run(on_replica)
        assert replicas.values(strategy, bias) == [1.0, 1.0]


class Doubling(O.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(2 * g, v) for g, v in grads_and_vars])


def test_an_inner_apply_gradients_is_called():
    [values] = steps.stepped(
        lambda: tf_xshard.CrossShardOptimizer(Doubling(1.0)),
        lambda r: [tf.constant(1.0 + r)],
        num_replicas=2,
    )
    assert values == [-6.0, -6.0]


def test_static_loss_scale_with_indexed_slices():
    [values] = steps.stepped(
        lambda: tf_xshard.CrossShardOptimizer(
            O.SGD(1.0, loss_scale_factor=8.0)
        ),
        lambda r: [
            tf.IndexedSlices(tf.fill([2, 1], 4.0 * (r + 1)), [1, 1], [2, 1])
        ],
        [np.zeros([2, 1])],
        num_replicas=2,
    )
    for value in values:
        assert value.tolist() == [[0.0], [-3.0]]


def test_constraints_and_overwrite_with_gradient():
    """An overwritten variable gets the group's mean."""
    strategy = replicas.mirrored(4)
    with strategy.scope():
        weight, positive = keras.Variable(1.0), keras.Variable(1.0)
        positive.constraint = keras.constraints.NonNeg()
        scale = keras.Variable(0.0)
        scale.overwrite_with_gradient = True
        optimizer = tf_xshard.CrossShardOptimizer(
            O.SGD(1.0), "sum", [[0, 1], [2, 3]]
        )
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [tf.constant(0.25)] * 2 + [tf.constant(float(r))],
        [weight, positive, scale],
    )
    assert replicas.values(strategy, weight) == [-1.0] * 4
    assert replicas.values(strategy, positive) == [0.0] * 4
    assert replicas.values(strategy, scale) == [0.5, 0.5, 2.5, 2.5]


def _rate_callbacks(rate):
    """Both in each of two epochs; at the second's end a tenth of the rate."""
    return [
        keras.callbacks.LearningRateScheduler(rate),
        keras.callbacks.ReduceLROnPlateau(
            monitor="loss", factor=0.1, patience=0, min_delta=1e9
        ),
    ]


def test_learning_rate_callbacks():
    with replicas.mirrored(2).scope():
        model = training.model()
        model.compile(tf_xshard.CrossShardOptimizer(O.SGD(0.1)), "mse")
    history = _fit(
        model, epochs=2, callbacks=_rate_callbacks(lambda epoch, lr: lr / 2)
    )
    np.testing.assert_allclose(history.history["learning_rate"], [0.05, 0.025])
    rate = model.optimizer.inner_optimizer.learning_rate
    np.testing.assert_allclose(replicas.values(None, rate), [0.0025])


@needs_multi_optimizer
def test_callbacks_set_the_local_rates_of_agn():
    """Those that `learning_rate` means, not the center's."""
    optimizer = tf_xshard.AGNOptimizer(
        O.MultiOptimizer(O.OptimizerMap(O.SGD(0.5))), communication_period=2
    )
    model = training.model()
    model.compile(optimizer, "mse")
    _fit(model, epochs=2, callbacks=_rate_callbacks(lambda epoch, lr: 0.25))
    [local], [center] = (
        one.optimizers
        for one in (optimizer.local_optimizer, optimizer.inner_optimizer)
    )
    np.testing.assert_allclose(float(local.learning_rate), 0.025)
    assert float(center.learning_rate) == 0.5
    with pytest.raises(AttributeError, match="on a MultiOptimizer"):
        optimizer.learning_rate = 0.1
