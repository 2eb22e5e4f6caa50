"""A row of a table that has no code is an error wherever it can't work."""

import keras
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tf_xshard import reductions
from tf_xshard import wire_formats

_SGD = keras.optimizers.SGD


def test_a_reduction_without_code(monkeypatch):
    nonsense = reductions.Reduction("median")
    monkeypatch.setitem(reductions.TABLE, "median", nonsense)
    v1_sgd = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    for use in (
        lambda name: tf_xshard.CrossShardOptimizer(_SGD(), name),
        lambda name: tf_xshard.TowerOptimizer(_SGD(), 2, name),
        lambda name: tf_xshard.AGNOptimizer(_SGD(), reduction=name),
        lambda name: tf_xshard.group_reduce(tf.ones([2]), reduction=name),
        lambda name: tf_xshard.compat.v1.CrossShardOptimizer(v1_sgd, name),
    ):
        with pytest.raises(ValueError, match="reduction must be .*'median'"):
            use("median")


def test_a_wire_dtype_without_code(monkeypatch):
    name = "float8_e4m3fn"
    row = wire_formats.WireFormat(name)
    monkeypatch.setitem(wire_formats.TABLE, name, row)
    with pytest.raises(ValueError, match=f"{name}.*is not supported"):
        tf_xshard.Communication(dtype=name)


def test_a_wire_dtype_that_the_strategy_has_not(monkeypatch):
    row = wire_formats.WireFormat("float16", "sum", strategies=("tpu",))
    monkeypatch.setitem(wire_formats.TABLE, "float16", row)
    how = tf_xshard.Communication(dtype="float16")
    with replicas.mirrored(2).scope():
        inner = _SGD()
        with pytest.raises(ValueError, match="can't be used under Mirrored"):
            tf_xshard.CrossShardOptimizer(inner, communication=how)


@pytest.mark.parametrize("has_loss_scale", [False, True])
def test_an_inner_optimizer_is_not_applied_directly(has_loss_scale):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(1.0)
        inner = _SGD(0.5)
        if has_loss_scale:
            inner = keras.optimizers.LossScaleOptimizer(inner)
        outer = tf_xshard.CrossShardOptimizer(inner)
        outer.build([weight])

    def step(optimizer):
        strategy.run(lambda: optimizer.apply([tf.constant(1.0)], [weight]))

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no longer sums gradients"):
            step(inner)
    assert replicas.values(strategy, weight) == [1.0, 1.0]
    assert inner.iterations.numpy() == 0
    step(outer)
    # The loss scale starts at 2 ** 15.
    expected = 1.0 - 0.5 * 2 / (2**15 if has_loss_scale else 1)
    assert replicas.values(strategy, weight) == [expected] * 2


def test_an_inner_optimizer_of_one_replica_can_be_applied():
    weight = keras.Variable(1.0)
    inner = _SGD(0.5)
    tf_xshard.CrossShardOptimizer(inner)
    inner.apply([tf.constant(1.0)], [weight])
    assert float(weight) == 0.5


def test_a_variable_is_known_by_tensorflow_s_inside_it():
    """As in plain Keras: gradients may come for either."""
    for make in (
        tf_xshard.CrossShardOptimizer,
        lambda inner: tf_xshard.TowerOptimizer(inner, 1),
        lambda inner: tf_xshard.AGNOptimizer(inner, communication_period=1),
    ):
        weight = keras.Variable(1.0)
        optimizer = make(_SGD(0.5))
        optimizer.build([weight])
        optimizer.apply([tf.constant(1.0)], [weight.value])
        assert float(weight) == 0.5
