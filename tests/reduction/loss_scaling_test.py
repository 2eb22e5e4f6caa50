"""LossScaleOptimizer inside: all replicas skip together."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import steps
from tests.support import traced


def _optimizer(groups=None, **kwargs):
    inner = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=1024.0, dynamic_growth_steps=2
    )
    return tf_xshard.CrossShardOptimizer(
        inner, group_assignment=groups, **kwargs
    )


@pytest.mark.parametrize(
    "name, kind",
    [("groups", "mirrored"), ("groups", "tpu"), ("one", "tpu_permuted")],
)
def test_an_overflow_on_one_replica(name, kind):
    groups = [[0, 2], [1, 3]] if name == "groups" else None
    one = traced.Traced(lambda: _optimizer(groups), [np.zeros(3)], kind)
    scaler = one.optimizer.inner_optimizer
    good = np.outer(np.arange(4) / 4, np.ones(3))

    def check(weights, iterations, scale):
        for variable, expected in (
            (*one.weights, weights),
            (one.optimizer.iterations, [iterations] * 4),
            (scaler.dynamic_scale, [scale] * 4),
        ):
            got = np.stack(replicas.values(one.strategy, variable))
            np.testing.assert_array_equal(
                got.T, np.broadcast_to(expected, got.T.shape)
            )

    means = [-1.5] * 4 if groups is None else [-1.0, -2.0, -1.0, -2.0]
    for bad_replica in range(4):
        one.weights[0].assign(np.zeros(3))
        bad = good.copy()
        bad[bad_replica, 1] = (np.inf, np.nan)[bad_replica % 2]
        one.step(bad)
        check([0] * 4, 2 * bad_replica, 512)
        for _ in range(2):
            one.step(good)
        check(means, 2 * bad_replica + 2, 1024)


def test_an_overflow_of_the_sum_in_one_group_only():
    """Each float16 gradient is finite, the sum of group 1 is not."""
    [values] = steps.stepped(
        lambda: _optimizer(
            [[0, 1], [2, 3]], reduction="sum", loss_normalization="replica"
        ),
        lambda r: [tf.constant(6e4 if r > 1 else 1.0, tf.float16)],
        dtype="float16",
    )
    assert values == [0.0] * 4


@pytest.mark.parametrize("argument", ["pre_reduce", "post_reduce"])
def test_no_hook_hides_an_overflow(argument):
    hide = lambda pairs: [(tf.ones_like(g), v) for g, v in pairs]
    [values] = steps.stepped(
        lambda: _optimizer(**{argument: hide}),
        lambda r: [tf.constant(np.inf if r == 1 else 1.0)],
        num_replicas=2,
    )
    assert values == [0.0, 0.0]


def test_clipped_values_that_are_not_finite_stay():
    clip = tf_xshard.clip_by_value(-1.0, 1.0)
    [(clipped, _)] = clip([(tf.constant([np.inf, 3.0, -np.inf]), None)])
    assert clipped.numpy().tolist() == [np.inf, 1.0, -np.inf]
