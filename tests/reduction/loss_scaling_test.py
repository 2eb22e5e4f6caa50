"""LossScaleOptimizer inside: all replicas skip together."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import seeds
from tests.support import training

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


@pytest.mark.parametrize(
    "groups, kind, bad_replica, bad_value",
    replicas.pairwise(
        list(GROUPS),
        list(replicas.STRATEGIES),
        list(range(NUM_REPLICAS)),
        [np.inf, np.nan],
    ),
)
def test_an_overflow_on_one_replica(groups, kind, bad_replica, bad_value):
    groups = GROUPS[groups]
    strategy = replicas.STRATEGIES[kind](NUM_REPLICAS)
    with strategy.scope():
        weight = keras.Variable(np.zeros(3), dtype="float32")
        optimizer = _optimizer(groups)
        optimizer.build([weight])
    scaler = optimizer.inner_optimizer

    @tf.function(autograph=False)
    def step(overflow):
        def on_replica(overflow):
            r = replicas.replica_id_tensor()
            gradient = optimizer.scale_loss(
                tf.fill([3], tf.cast(r, tf.float32) / NUM_REPLICAS)
            )
            gradient = tf.where(
                overflow & (r == bad_replica) & [False, True, False],
                tf.constant(bad_value, tf.float32),
                gradient,
            )
            optimizer.apply([gradient], [weight])

        strategy.run(on_replica, args=(overflow,))

    step(tf.constant(True))
    for got in _check_equal_within_groups(strategy, weight, groups):
        assert got.tolist() == [0, 0, 0]
    assert replicas.values(strategy, scaler.dynamic_scale) == [512.0] * 4
    assert replicas.values(strategy, optimizer.iterations) == [0] * 4
    step(tf.constant(False))
    step(tf.constant(False))
    means = [1.5] * 4 if groups is None else [1.0, 2.0, 1.0, 2.0]
    got = _check_equal_within_groups(strategy, weight, groups)
    for value, mean in zip(got, means, strict=True):
        np.testing.assert_array_equal(value, np.full(3, -2 * 0.5 * mean))
    assert replicas.values(strategy, scaler.dynamic_scale) == [1024.0] * 4
    assert replicas.values(strategy, optimizer.iterations) == [2] * 4


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_mixed_float16_fit_with_overflows(groups):
    """The first scales overflow float16; all replicas find the same one."""
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
        inner = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.01), initial_scale=2.0**20
        )
        model.compile(
            optimizer=tf_xshard.CrossShardOptimizer(
                inner, group_assignment=groups
            ),
            loss="mse",
            auto_scale_loss=False,
        )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype("float32")
    # Replica 2's shard of every batch has targets that overflow.
    y = np.ones([64, 1], np.float32)
    y.reshape(4, 4, 4)[:, 2] = 60.0
    before = np.mean((model(x) - y) ** 2)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16).repeat(8)
    model.fit(dataset, shuffle=False, verbose=0)
    assert np.mean((model(x) - y) ** 2) < before
    for variable in model.trainable_variables:
        _check_equal_within_groups(strategy, variable, groups)
    scales = replicas.values(strategy, inner.dynamic_scale)
    assert len(set(map(float, scales))) == 1
    assert scales[0] < 2.0**20
    iterations = replicas.values(strategy, model.optimizer.iterations)
    assert len(set(map(int, iterations))) == 1 and 0 < iterations[0] < 32


def test_an_overflow_of_the_sum_in_one_group_only():
    """Each float16 gradient is finite, the sum of group 1 is not."""
    strategy = replicas.mirrored(NUM_REPLICAS)
    with strategy.scope():
        weight = keras.Variable(0.0, dtype="float16")
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.5), initial_scale=2.0
            ),
            "sum",
            [[0, 1], [2, 3]],
            loss_normalization="replica",
        )
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [tf.constant(6e4 if r > 1 else 1.0, tf.float16)],
        [weight],
    )
    assert replicas.values(strategy, weight) == [0.0] * 4
    assert (
        replicas.values(strategy, optimizer.inner_optimizer.dynamic_scale)
        == [1.0] * 4
    )


@pytest.mark.parametrize("argument", ["pre_reduce", "post_reduce"])
@pytest.mark.parametrize(
    "function",
    [
        tf_xshard.clip_by_value(-1.0, 1.0),
        tf_xshard.clip_by_norm(1.0),
        tf_xshard.clip_by_global_norm(1.0),
        # A function that hides the overflow.
        lambda pairs: [(tf.ones_like(g), v) for g, v in pairs],
    ],
    ids=["value", "norm", "global_norm", "hides"],
)
def test_no_clipping_hides_an_overflow(argument, function):
    strategy = replicas.mirrored(NUM_REPLICAS)
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = _optimizer(None, **{argument: function})
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [tf.constant(np.inf if r == 3 else 1.0)],
        [weight],
    )
    assert replicas.values(strategy, weight) == [0.0] * 4
    assert (
        replicas.values(strategy, optimizer.inner_optimizer.dynamic_scale)
        == [512.0] * 4
    )


@pytest.mark.parametrize(
    "argument",
    ["pre_reduce", "post_reduce"],
)
def test_a_bound_means_the_same_under_mixed_float16(argument):
    """And for any number of replicas."""
    moved = {}
    for policy in ("float32", "mixed_float16"):
        for num_replicas in (2, 4):
            keras.mixed_precision.set_global_policy(policy)
            strategy = replicas.mirrored(num_replicas)
            seeds.seed(5)
            with strategy.scope():
                model = keras.Sequential(
                    [keras.layers.Input((4,)), keras.layers.Dense(1)]
                )
                inner = keras.optimizers.SGD(0.5)
                if policy == "mixed_float16":
                    inner = keras.optimizers.LossScaleOptimizer(
                        inner, initial_scale=64.0
                    )
                model.compile(
                    optimizer=tf_xshard.CrossShardOptimizer(
                        inner,
                        **{argument: tf_xshard.clip_by_global_norm(0.25)},
                    ),
                    loss="mse",
                    auto_scale_loss=False,
                )
            # Equal shards, so that clipping before and after agree for any N.
            x = np.tile(np.arange(4, dtype=np.float32)[None] / 4, [8, 1])
            start = replicas.values(strategy, model.weights[0])[0]
            training.run_steps(model, [(x, np.full([8, 1], 9.0))])
            for got in replicas.values(strategy, model.weights[0]):
                moved[policy, num_replicas] = got - start
    kernel_and_bias = np.linalg.norm([*np.arange(4) / 4, 1.0])
    expected = 0.5 * 0.25 * np.arange(4)[:, None] / 4 / kernel_and_bias
    for got in moved.values():
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-4)
