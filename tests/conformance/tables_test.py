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
        lambda: tf_xshard.CrossShardOptimizer(_SGD(), "median"),
        lambda: tf_xshard.TowerOptimizer(_SGD(), 2, "median"),
        lambda: tf_xshard.AGNOptimizer(_SGD(), reduction="median"),
        lambda: tf_xshard.group_reduce(tf.ones([2]), reduction="median"),
        lambda: tf_xshard.compat.v1.CrossShardOptimizer(v1_sgd, "median"),
    ):
        with pytest.raises(ValueError, match="reduction must be .*'median'"):
            use()


def test_a_wire_dtype_without_code(monkeypatch):
    """In no strategy, or not in the one that is used."""
    table = wire_formats.TABLE
    nowhere = wire_formats.WireFormat("float8_e4m3fn")
    on_tpus = wire_formats.WireFormat("float16", "sum", strategies=("tpu",))
    monkeypatch.setitem(table, "float8_e4m3fn", nowhere)
    monkeypatch.setitem(table, "float16", on_tpus)
    with pytest.raises(ValueError, match="float8_e4m3fn.*is not supported"):
        tf_xshard.Communication(dtype="float8_e4m3fn")
    how = tf_xshard.Communication(dtype="float16")
    with replicas.mirrored(2).scope():
        with pytest.raises(ValueError, match="can't be used under Mirrored"):
            tf_xshard.CrossShardOptimizer(_SGD(), communication=how)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("has_loss_scale", [False, True])
def test_an_inner_optimizer_is_not_applied_directly(
    has_loss_scale, num_replicas
):
    """Except on one replica, where there is nothing to sum."""
    strategy = replicas.mirrored(num_replicas)
    with strategy.scope():
        weight = keras.Variable(1.0)
        inner = _SGD(0.5)
        if has_loss_scale:
            # The loss scale starts at 2 ** 15.
            inner = keras.optimizers.LossScaleOptimizer(_SGD(0.5 * 2**15))
        outer = tf_xshard.CrossShardOptimizer(inner)
        outer.build([weight])

    def step(optimizer):
        strategy.run(lambda: optimizer.apply([tf.constant(1.0)], [weight]))

    if num_replicas == 2:
        with pytest.raises(RuntimeError, match="no longer sums gradients"):
            step(inner)
        assert replicas.values(strategy, weight) == [1.0, 1.0]
        assert inner.iterations.numpy() == 0
    else:
        step(inner)
    step(outer)
    assert replicas.values(strategy, weight) == [0.0] * num_replicas


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
