"""Checks in little time that every supported version works.

`python -m tests.programs.version_matrix --smoke` runs these tests on each
supported Keras, with --full; the rest of the suite runs on the newest.
"""

import functools

import keras
import pytest

import tf_xshard
from tests.support import replicas
from tests.support import training

O = keras.optimizers  # noqa: E741
pytestmark = pytest.mark.full
cross = tf_xshard.CrossShardOptimizer
sharded = functools.partial(cross, shard_update=True)
tower = functools.partial(tf_xshard.TowerOptimizer, num_towers=1)
towers = functools.partial(tf_xshard.TowerOptimizer, num_towers=4)
agn = functools.partial(tf_xshard.AGNOptimizer, communication_period=1)
adam = functools.partial(O.Adam, 0.05, global_clipnorm=0.5, weight_decay=0.01)
# Overwriting the weights is in a tf.cond, where Keras calls merge_call.
average = functools.partial(
    O.SGD, 0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
)


def scaled(inner):
    return cross(O.LossScaleOptimizer(inner))


@pytest.mark.parametrize(
    "wrap, inner, kind, num_towers",
    [
        (cross, adam, "mirrored", 1),
        (sharded, adam, "mirrored", 1),
        (tower, adam, "tpu", 1),
        # Four batches of 16 rows are one of 64.
        (towers, adam, "mirrored", 4),
        (scaled, average, "mirrored", 1),
        (tower, average, "mirrored", 1),
        (sharded, average, "mirrored", 1),
        (agn, O.SGD, "mirrored", 1),
    ],
)
def test_fit_on_two_replicas(wrap, inner, kind, num_towers):
    _, expected = training.train(inner, batch_size=64, num_steps=4)
    _, got = training.train(
        lambda: wrap(inner()),
        replicas.STRATEGIES[kind](2),
        batch_size=64 // num_towers,
        num_steps=4 * num_towers,
        fit=True,
    )
    assert training.deviation(got, expected) <= 2e-6


@pytest.mark.parametrize(
    "wrap, move",
    [
        (cross, training.by_keras_file),
        (tower, training.by_group_state),
        (sharded, training.by_keras_file),
    ],
)
def test_save_and_load(wrap, move, tmp_path):
    strategy = replicas.mirrored(2)

    def trained(num_steps):
        return training.train(
            lambda: wrap(adam()), strategy, num_steps=num_steps
        )

    new, _ = trained(0)
    move(trained(2)[0], new, tmp_path)
    x, y = training.data()
    third = slice(2 * training.BATCH_SIZE, 3 * training.BATCH_SIZE)
    training.run_steps(new, [(x[third], y[third])])
    _, expected = trained(3)
    assert training.deviation(training.weights(new, strategy), expected) == 0
