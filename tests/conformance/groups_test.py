"""Replicas of a group are equal; each group is one device on its shards."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import training
from tests.support.versions import needs_multi_optimizer

NUM_REPLICAS = 8


def _groups(layout, group_size):
    if layout == "contiguous":
        return tf_xshard.GroupAssignment.contiguous(NUM_REPLICAS, group_size)
    if layout == "strided":
        return tf_xshard.GroupAssignment.strided(NUM_REPLICAS, group_size)
    order = np.random.default_rng(group_size).permutation(NUM_REPLICAS)
    return tf_xshard.GroupAssignment(order.reshape(-1, group_size))


def _momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)


@functools.cache
def _alone(members):
    """One device that is trained on the shards of these replicas."""
    x, y = training.data()
    rows = training.shard_rows(
        len(x), training.BATCH_SIZE, NUM_REPLICAS, members
    )
    return training.train(
        _momentum,
        xy=(x[rows], y[rows]),
        batch_size=training.BATCH_SIZE // NUM_REPLICAS * len(members),
    )[1]


@pytest.mark.parametrize(
    "kind, group_size, layout",
    [
        ("mirrored", 1, "contiguous"),
        ("mirrored", 2, "shuffled"),
        ("mirrored", 4, "strided"),
        ("mirrored", 4, "shuffled"),
        ("mirrored", 8, "contiguous"),
        ("tpu", 2, "shuffled"),
        ("tpu_permuted", 2, "shuffled"),
        ("tpu", 4, "contiguous"),
        ("tpu", 8, "strided"),
        ("tpu_permuted", 1, "contiguous"),
        ("tpu_permuted", 4, "strided"),
    ],
)
def test_groups_train_apart(layout, group_size, kind, report):
    groups = _groups(layout, group_size)
    strategy = replicas.STRATEGIES[kind](NUM_REPLICAS)
    model, weights = training.train(
        lambda: tf_xshard.CrossShardOptimizer(
            _momentum(), group_assignment=groups
        ),
        strategy,
    )
    slots = [replicas.values(strategy, v) for v in model.optimizer.variables]
    largest = 0.0
    for members in groups:
        for values in weights + slots:
            for r in members:
                np.testing.assert_array_equal(values[r], values[members[0]])
        largest = max(
            largest,
            training.deviation(weights, _alone(members), members),
        )
    report(f"{groups!r}, {kind}: max |dw| from one device {largest:.1e}")
    assert largest <= 1e-6
    for group, other in itertools.pairwise(groups):
        assert np.abs(weights[0][group[0]] - weights[0][other[0]]).max() > 1e-3


@replicas.on_mirrored_and_permuted
def test_moving_averages_of_groups_survive_the_end_of_fit(kind):
    """`fit` ends with each replica's own average in its weights."""
    x, y = training.data()

    def averaged():
        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8)

    groups = [[0, 3], [2, 1]]
    _, weights = training.train(
        lambda: tf_xshard.CrossShardOptimizer(
            averaged(), group_assignment=groups
        ),
        replicas.STRATEGIES[kind](4),
    )
    for members in groups:
        rows = training.shard_rows(len(x), training.BATCH_SIZE, 4, members)
        alone = training.train(averaged, xy=(x[rows], y[rows]), batch_size=32)[
            1
        ]
        assert training.deviation(weights, alone, members) <= 1e-6
    assert np.abs(weights[0][0] - weights[0][1]).max() > 1e-3


@replicas.on_mirrored_and_permuted
def test_three_groups_of_two(kind):
    """A number of replicas that is no power of two: the factor is not exact."""
    strategy = replicas.STRATEGIES[kind](6)

    def clipped():
        return keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.2)

    x, y = training.data(48 * 4)
    _, weights = training.train(
        lambda: tf_xshard.CrossShardOptimizer(
            clipped(), group_assignment=[[5, 0], [1, 3], [2, 4]]
        ),
        strategy,
        xy=(x, y),
        batch_size=48,
    )
    for members in ([5, 0], [1, 3], [2, 4]):
        rows = training.shard_rows(len(x), 48, 6, members)
        alone = training.train(clipped, xy=(x[rows], y[rows]), batch_size=16)[1]
        assert training.deviation(weights, alone, members) <= 1e-6


@replicas.on_every_strategy
def test_another_groups_overflow_stays_there(kind):
    strategy = replicas.STRATEGIES[kind](4)
    for graph in (True, False) if kind == "mirrored" else (True,):
        with strategy.scope():
            weight = keras.Variable(0.0)
            optimizer = tf_xshard.CrossShardOptimizer(
                keras.optimizers.SGD(1.0), group_assignment=[[0, 1], [2, 3]]
            )
        replicas.apply_once(
            strategy,
            optimizer,
            lambda r: [tf.constant(np.inf if r == 3 else 1.0)],
            [weight],
            graph,
        )
        # "global": what arrives is g / 4, so g is 4.
        assert replicas.values(strategy, weight) == [-4, -4, -np.inf, -np.inf]


@needs_multi_optimizer
@replicas.on_every_strategy
def test_a_multi_optimizer_may_group_each_variable_otherwise(kind):
    strategy = replicas.STRATEGIES[kind](4)
    with strategy.scope():
        body = keras.Variable(0.0, name="body")
        head = keras.Variable(0.0, name="head")
        optimizer = keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(
                tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(1.0)),
                {
                    "head": tf_xshard.CrossShardOptimizer(
                        keras.optimizers.SGD(1.0),
                        group_assignment=[[0, 2], [1, 3]],
                    )
                },
            )
        )
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [tf.constant(10.0**r), tf.constant(10.0**r)],
        [body, head],
    )
    assert replicas.values(strategy, body) == [-1111] * 4
    assert replicas.values(strategy, head) == [-202, -2020, -202, -2020]
