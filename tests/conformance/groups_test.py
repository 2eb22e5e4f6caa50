"""Replicas of a group are equal; each group is one device on its shards."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import mutants
from tests.support import replicas
from tests.support import steps
from tests.support import training
from tests.support.versions import needs_multi_optimizer

SGD = keras.optimizers.SGD
OPTIMIZERS = {
    "momentum": lambda: SGD(0.05, momentum=0.9, global_clipnorm=0.5),
    # `fit` ends with each replica's own average in its weights.
    "average": lambda: SGD(0.1, use_ema=True, ema_momentum=0.8),
}
ROWS_PER_REPLICA = 8  # Of a batch.
PAIRS = [[0, 1], [2, 3]]


def _data(num_replicas):
    return training.data(4 * ROWS_PER_REPLICA * num_replicas)


@functools.cache
def _alone(optimizer, num_replicas, members):
    """One device that is trained on the shards of these replicas."""
    x, y = _data(num_replicas)
    rows = training.shard_rows(
        len(x), ROWS_PER_REPLICA * num_replicas, num_replicas, members
    )
    return training.train(
        OPTIMIZERS[optimizer],
        xy=(x[rows], y[rows]),
        batch_size=ROWS_PER_REPLICA * len(members),
    )[1]


def _in_groups(optimizer, kind, groups):
    """The model and its weights, and the deviation of each group's."""
    n = groups.num_replicas
    model, weights = training.train(
        lambda: tf_xshard.CrossShardOptimizer(
            OPTIMIZERS[optimizer](), group_assignment=groups
        ),
        replicas.STRATEGIES[kind](n),
        _data(n),
        batch_size=ROWS_PER_REPLICA * n,
    )
    deviations = [
        training.deviation(weights, _alone(optimizer, n, members), members)
        for members in groups
    ]
    return model, weights, deviations


@pytest.mark.parametrize(
    "optimizer, kind, groups",
    [
        ("momentum", "mirrored", [[r] for r in range(8)]),
        ("momentum", "mirrored", [[6, 2], [0, 5], [7, 1], [4, 3]]),
        ("momentum", "mirrored", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("momentum", "mirrored", [[*range(8)]]),
        # No power of two: the factor is not exact.
        ("momentum", "mirrored", [[5, 0], [1, 3], [2, 4]]),
        ("momentum", "tpu", [[6, 2], [0, 5], [7, 1], [4, 3]]),
        ("momentum", "tpu_permuted", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("average", "mirrored", [[0, 3], [2, 1]]),
        ("average", "tpu_permuted", [[0, 3], [2, 1]]),
    ],
    ids=str,
)
def test_groups_train_apart(optimizer, kind, groups, report):
    groups = tf_xshard.GroupAssignment(groups)
    model, weights, deviations = _in_groups(optimizer, kind, groups)
    strategy = model.distribute_strategy
    slots = [replicas.values(strategy, v) for v in model.optimizer.variables]
    for members in groups:
        for values in weights + slots:
            for r in members:
                np.testing.assert_array_equal(values[r], values[members[0]])
    report(f"{groups!r}, {kind}: max |dw| of one device {max(deviations):.1e}")
    assert max(deviations) <= 1e-6
    for group, other in itertools.pairwise(groups):
        assert np.abs(weights[0][group[0]] - weights[0][other[0]]).max() > 1e-3


def test_groups_that_are_ignored_are_noticed():
    groups = tf_xshard.GroupAssignment([[0], [1]])
    with mutants.mutant("groups_ignored"):
        _, _, deviations = _in_groups("momentum", "mirrored", groups)
    assert min(deviations) > 1e-3


@pytest.mark.parametrize(
    "kind, graph",
    [("mirrored", True), ("mirrored", False), ("tpu_permuted", True)],
)
def test_another_groups_overflow_stays_there(kind, graph):
    [weights] = steps.stepped(
        lambda: tf_xshard.CrossShardOptimizer(SGD(1.0), group_assignment=PAIRS),
        lambda r: [tf.constant(np.inf if r == 3 else 1.0)],
        kind=kind,
        graph=graph,
    )
    # "global": what arrives is g / 4, so g is 4.
    assert weights == [-4, -4, -np.inf, -np.inf]


@needs_multi_optimizer
def test_a_multi_optimizer_may_group_each_variable_otherwise():
    in_all, in_pairs = steps.stepped(
        lambda: keras.optimizers.MultiOptimizer(
            lambda variable: tf_xshard.CrossShardOptimizer(
                SGD(1.0),
                group_assignment=PAIRS if len(variable.shape) else None,
            )
        ),
        lambda r: [tf.constant(10.0**r), tf.constant([10.0**r])],
        [0.0, [0.0]],
    )
    assert in_all == [-1111] * 4
    assert in_pairs == [-22, -22, -2200, -2200]
