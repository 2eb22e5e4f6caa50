"""LossScaleOptimizer inside: all replicas skip together."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import steps
from tests.support import training

GROUPS = {"one_group": None, "two_groups": [[0, 2], [1, 3]]}


def _optimizer(groups=None, **kwargs):
    inner = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=1024.0, dynamic_growth_steps=2
    )
    return tf_xshard.CrossShardOptimizer(
        inner, group_assignment=groups, **kwargs
    )


@pytest.mark.parametrize(
    "name, kind",
    [
        ("two_groups", "mirrored"),
        ("two_groups", "tpu"),
        ("one_group", "tpu_permuted"),
    ],
)
def test_an_overflow_on_one_replica(name, kind):
    groups = GROUPS[name]
    strategy = replicas.STRATEGIES[kind](4)
    with strategy.scope():
        weight = keras.Variable(np.zeros(3), dtype="float32")
        optimizer = _optimizer(groups)
        optimizer.build([weight])
    scaler = optimizer.inner_optimizer

    @tf.function(autograph=False)
    def step(*bad):
        def on_replica(bad_replica, bad_value):
            r = replicas.replica_id_tensor()
            gradient = optimizer.scale_loss(
                tf.fill([3], tf.cast(r, tf.float32) / 4)
            )
            is_bad = (r == bad_replica) & [False, True, False]
            optimizer.apply([tf.where(is_bad, bad_value, gradient)], [weight])

        strategy.run(on_replica, args=bad)

    def check(weights, iterations, scale):
        for variable, expected in (
            (weight, weights),
            (optimizer.iterations, [iterations] * 4),
            (scaler.dynamic_scale, [scale] * 4),
        ):
            got = np.stack(replicas.values(strategy, variable))
            np.testing.assert_array_equal(
                got.T, np.broadcast_to(expected, got.T.shape)
            )

    means = [-1.5] * 4 if groups is None else [-1.0, -2.0, -1.0, -2.0]
    for bad_replica in range(4):
        weight.assign(np.zeros(3))
        bad_value = (np.inf, np.nan)[bad_replica % 2]
        step(tf.constant(bad_replica), tf.constant(bad_value))
        check([0] * 4, 2 * bad_replica, 512)
        for _ in range(2):
            step(tf.constant(-1), tf.constant(0.0))
        check(means, 2 * bad_replica + 2, 1024)


def test_mixed_float16_with_overflows():
    """The first scales overflow float16; both groups find the same one."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    strategy = replicas.mirrored(2)
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
        model.compile(
            tf_xshard.CrossShardOptimizer(scaler, "mean", [[0], [1]]),
            "mse",
            auto_scale_loss=False,
        )
        model.optimizer.build(model.trainable_variables)
    before = model.get_weights()
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    # Replica 1's targets overflow.
    y = np.repeat([[1.0], [60.0]], 4, 0).astype("float32")
    training.run_steps(model, [(x, y)] * 32)
    for variable, start in zip(model.weights, before, strict=True):
        first, second = replicas.values(strategy, variable)
        assert np.isfinite(first).all() and np.isfinite(second).all()
        assert (first != second).any() and (first != start).any()
    first, second = replicas.values(strategy, scaler.dynamic_scale)
    assert first == second < 2.0**20
    first, second = replicas.values(strategy, model.optimizer.iterations)
    assert first == second and 0 < first < 32


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
        lambda: _optimizer(**{argument: function}),
        lambda r: [tf.constant(np.inf if r == 1 else 1.0)],
        num_replicas=2,
    )
    assert values == [0.0, 0.0]


def test_clipped_values_that_are_not_finite_stay():
    clip = tf_xshard.clip_by_value(-1.0, 1.0)
    [(clipped, _)] = clip([(tf.constant([np.inf, 3.0, -np.inf]), None)])
    assert clipped.numpy().tolist() == [np.inf, 1.0, -np.inf]
