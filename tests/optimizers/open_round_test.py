"""An open round of TowerOptimizer, or period of AGNOptimizer, is saved on N
replicas and completed on another number of them."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas

SGD = keras.optimizers.SGD
FIRST = np.float32([1, 10, 100, 1000])
SECOND = np.float32([7, 70, 700, 7000])
MAKERS = {
    "tower": lambda reduction, groups: tf_xshard.TowerOptimizer(
        tf_xshard.CrossShardOptimizer(SGD(1.0), reduction, groups), 2
    ),
    "tower_inside": lambda reduction, groups: tf_xshard.CrossShardOptimizer(
        tf_xshard.TowerOptimizer(SGD(1.0), 2), reduction, groups
    ),
    "agn": lambda reduction, groups: tf_xshard.AGNOptimizer(
        SGD(1.0),
        communication_period=2,
        reduction=reduction,
        group_assignment=groups,
    ),
}


class _Training:
    """A weight and its optimizer on several replicas."""

    def __init__(self, maker, reduction, num_replicas, groups=None):
        self.num_replicas = num_replicas
        self.strategy = replicas.mirrored(num_replicas)
        with self.strategy.scope():
            self.weight = keras.Variable(0.0, name="weight")
            self.optimizer = MAKERS[maker](reduction, groups)
            self.optimizer.build([self.weight])

    def step(self, gradients):
        replicas.apply_once(
            self.strategy,
            self.optimizer,
            lambda r: [tf.constant(gradients[r] / self.num_replicas)],
            [self.weight],
        )

    @property
    def held(self):
        return {"weight": [self.weight], "optimizer": self.optimizer}


@functools.cache
def _begun(maker, reduction, groups=None):
    """Half a round on four replicas."""
    begun = _Training(maker, reduction, 4, groups)
    begun.step(FIRST)
    return begun


def _by_checkpoint(one, other, directory):
    made = tf.train.Checkpoint(w=one.weight, o=one.optimizer)
    path = made.write(f"{directory}/checkpoint")
    read = tf.train.Checkpoint(w=other.weight, o=other.optimizer)
    read.read(path).assert_consumed()


def _by_group_state(one, other, directory):
    tf_xshard.GroupState(one.held).save(f"{directory}/groups")
    state = tf_xshard.GroupState(other.held)
    state.restore(f"{directory}/groups", regroup="mean")


def _by_set_weights(one, other, directory):
    other.weight.assign(one.weight.numpy())
    other.optimizer.set_weights([v.numpy() for v in one.optimizer.variables])


@pytest.mark.parametrize(
    "maker, reduction, num_replicas, move",
    replicas.pairwise(
        list(MAKERS),
        ("mean", "sum"),
        (1, 2, 3),
        (_by_checkpoint, _by_group_state, _by_set_weights),
    ),
)
def test_it_is_completed_on_another_number(
    maker, reduction, num_replicas, move, tmp_path
):
    after = _Training(maker, reduction, num_replicas)
    move(_begun(maker, reduction), after, tmp_path)
    after.step(SECOND)

    combine = getattr(np, reduction)
    expected = -(combine(FIRST) + combine(SECOND[:num_replicas])) / 2
    for value in replicas.values(after.strategy, after.weight):
        np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "maker, reduction", replicas.in_turn(MAKERS, ["mean", "sum"])
)
def test_groups_of_two_are_completed_by_groups_of_one(
    maker, reduction, tmp_path
):
    """Each group's own round, divided over another number of replicas."""
    before = _begun(maker, reduction, ((0, 3), (1, 2)))
    after = _Training(maker, reduction, 2, [[0], [1]])
    tf_xshard.GroupState(before.held).save(str(tmp_path))
    tf_xshard.GroupState(after.held).restore(
        str(tmp_path), regroup={0: 0, 1: 1}
    )
    after.step(SECOND)
    combine = getattr(np, reduction)
    for group, members in enumerate([[0, 3], [1, 2]]):
        expected = -(combine(FIRST[members]) + SECOND[group]) / 2
        value = replicas.values(after.strategy, after.weight)[group]
        np.testing.assert_allclose(value, expected, rtol=1e-6)
