"""LossScaleOptimizer inside: all replicas skip together."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import steps

NUM_REPLICAS = 4
GROUPS = {"one_group": None, "two_groups": [[0, 2], [1, 3]]}


def _optimizer(groups, **kwargs):
    inner = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=1024.0, dynamic_growth_steps=2
    )
    return tf_xshard.CrossShardOptimizer(
        inner, group_assignment=groups, **kwargs
    )


def _check_equal_within_groups(strategy, variable, groups):
    got = replicas.values(strategy, variable)
    assert all(np.isfinite(value).all() for value in got)
    for members in groups or [range(NUM_REPLICAS)]:
        for r in members:
            np.testing.assert_array_equal(got[r], got[members[0]])
    return got


@replicas.on_every_strategy
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_an_overflow_on_one_replica(groups, kind):
    strategy = replicas.STRATEGIES[kind](NUM_REPLICAS)
    with strategy.scope():
        weight = keras.Variable(np.zeros(3), dtype="float32")
        optimizer = _optimizer(groups)
        optimizer.build([weight])
    scaler = optimizer.inner_optimizer

    @tf.function(autograph=False)
    def step(bad_replica, bad_value):
        def on_replica(bad_replica, bad_value):
            r = replicas.replica_id_tensor()
            gradient = optimizer.scale_loss(
                tf.fill([3], tf.cast(r, tf.float32) / NUM_REPLICAS)
            )
            gradient = tf.where(
                (r == bad_replica) & [False, True, False], bad_value, gradient
            )
            optimizer.apply([gradient], [weight])

        strategy.run(on_replica, args=(bad_replica, bad_value))

    means = [1.5] * 4 if groups is None else [1.0, 2.0, 1.0, 2.0]
    for bad_replica in range(NUM_REPLICAS):
        weight.assign(np.zeros(3))
        bad_value = (np.inf, np.nan)[bad_replica % 2]
        step(tf.constant(bad_replica), tf.constant(bad_value))
        for got in _check_equal_within_groups(strategy, weight, groups):
            assert got.tolist() == [0, 0, 0]
        updates = 2 * bad_replica
        iterations = replicas.values(strategy, optimizer.iterations)
        assert iterations == [updates] * 4
        assert replicas.values(strategy, scaler.dynamic_scale) == [512.0] * 4
        for _ in range(2):
            step(tf.constant(-1), tf.constant(0.0))
        got = _check_equal_within_groups(strategy, weight, groups)
        for value, mean in zip(got, means, strict=True):
            np.testing.assert_array_equal(value, np.full(3, -2 * 0.5 * mean))
        assert replicas.values(strategy, scaler.dynamic_scale) == [1024.0] * 4
        iterations = replicas.values(strategy, optimizer.iterations)
        assert iterations == [updates + 2] * 4


@pytest.mark.parametrize("num_towers", [1, 2])
def test_mixed_float16_fit_with_overflows(num_towers):
    """The first scales overflow float16; all replicas find the same one."""
    groups = GROUPS["two_groups"]
    keras.mixed_precision.set_global_policy("mixed_float16")
    strategy = replicas.mirrored(NUM_REPLICAS)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.Dense(8, activation="relu"),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        scaler = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.01), initial_scale=2.0**20
        )
        optimizer = tf_xshard.CrossShardOptimizer(
            scaler, group_assignment=groups
        )
        if num_towers > 1:
            optimizer = tf_xshard.TowerOptimizer(optimizer, num_towers)
        model.compile(optimizer, "mse", auto_scale_loss=False)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    # Replica 2's shard of every batch has targets that overflow.
    y = np.ones([64, 1], np.float32)
    y.reshape(4, 4, 4)[:, 2] = 60.0
    before = np.mean((model(x) - y) ** 2)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16).repeat(8)
    model.fit(dataset, shuffle=False, verbose=0)
    assert np.mean((model(x) - y) ** 2) < before
    for variable in model.trainable_variables:
        _check_equal_within_groups(strategy, variable, groups)
    scales = replicas.values(strategy, scaler.dynamic_scale)
    assert len(set(map(float, scales))) == 1 and scales[0] < 2.0**20
    iterations = replicas.values(strategy, model.optimizer.iterations)
    assert len(set(map(int, iterations))) == 1 and 0 < iterations[0] < 32


def test_an_overflow_of_the_sum_in_one_group_only():
    """Each float16 gradient is finite, the sum of group 1 is not."""
    [values] = steps.stepped(
        lambda: tf_xshard.CrossShardOptimizer(
            keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.5), initial_scale=2.0
            ),
            "sum",
            [[0, 1], [2, 3]],
            loss_normalization="replica",
        ),
        lambda r: [tf.constant(6e4 if r > 1 else 1.0, tf.float16)],
        dtype="float16",
    )
    assert values == [0.0] * 4


def _hides(pairs):
    """A function that hides the overflow."""
    return [(tf.ones_like(g), v) for g, v in pairs]


@pytest.mark.parametrize(
    "argument, function",
    [
        ("pre_reduce", tf_xshard.clip_by_value(-1.0, 1.0)),
        ("post_reduce", tf_xshard.clip_by_norm(1.0)),
        ("pre_reduce", tf_xshard.clip_by_global_norm(1.0)),
        ("pre_reduce", _hides),
        ("post_reduce", _hides),
    ],
    ids=["value", "norm", "global_norm", "hides_before", "hides_after"],
)
def test_no_clipping_hides_an_overflow(argument, function):
    [values] = steps.stepped(
        lambda: _optimizer(None, **{argument: function}),
        lambda r: [tf.constant(np.inf if r == 1 else 1.0)],
        num_replicas=2,
    )
    assert values == [0.0, 0.0]
