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
# The gradients of each replica, and how many rows have them.
FIRST, NUM_FIRST = np.float32([1, 10, 100, 1000]), [3, 1, 2, 4]
SECOND, NUM_SECOND = np.float32([7, 70, 700]), [1, 4, 2]


def _tower(reduction, groups):
    return tf_xshard.TowerOptimizer(
        tf_xshard.CrossShardOptimizer(SGD(1.0), reduction, groups), 2
    )


MAKERS = {
    "tower": _tower,
    # Its items are counted, and saved with the round.
    "global_mean": _tower,
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
        self._loss = None
        if maker == "global_mean":
            self._loss = tf_xshard.GlobalMean(lambda y, p: p, groups)

    def step(self, gradients, num_rows):
        def gradient(r):
            if self._loss is None:
                return [tf.constant(gradients[r] / self.num_replicas)]
            rows = tf.fill([num_rows[r], 1], gradients[r])
            with tf.GradientTape() as tape:
                value = self._loss(rows, rows * self.weight)
            return [tape.gradient(value, self.weight.value)]

        replicas.apply_once(
            self.strategy, self.optimizer, gradient, [self.weight]
        )

    @property
    def held(self):
        return {"weight": [self.weight], "optimizer": self.optimizer}


@functools.cache
def _begun(maker, reduction, num_replicas=2, groups=None):
    """Half a round."""
    begun = _Training(maker, reduction, num_replicas, groups)
    begun.step(FIRST, NUM_FIRST)
    return begun


def _expected(maker, reduction, first, second):
    """After a round of the replicas `first`, and then `second`."""
    combine = getattr(np, reduction)
    if maker != "global_mean":
        return -(combine(FIRST[first]) + combine(SECOND[second])) / 2
    counts = [np.take(NUM_FIRST, first), np.take(NUM_SECOND, second)]
    total = counts[0] @ FIRST[first] + counts[1] @ SECOND[second]
    return -total / np.sum(np.concatenate(counts))


def _by_checkpoint(one, other, directory):
    made = tf.train.Checkpoint(w=one.weight, o=one.optimizer)
    path = made.write(f"{directory}/checkpoint")
    read = tf.train.Checkpoint(w=other.weight, o=other.optimizer)
    read.read(path).assert_existing_objects_matched()


def _by_group_state(one, other, directory):
    tf_xshard.GroupState(one.held).save(f"{directory}/groups")
    state = tf_xshard.GroupState(other.held)
    state.restore(f"{directory}/groups", regroup="mean")


def _by_set_weights(one, other, directory):
    other.weight.assign(one.weight.numpy())
    other.optimizer.set_weights([v.numpy() for v in one.optimizer.variables])


@pytest.mark.parametrize(
    "maker, reduction, num_replicas, move",
    [
        ("tower", "mean", 1, _by_checkpoint),
        ("tower", "sum", 3, _by_group_state),
        ("tower_inside", "sum", 1, _by_set_weights),
        ("tower_inside", "mean", 3, _by_checkpoint),
        ("agn", "sum", 1, _by_group_state),
        pytest.param("agn", "mean", 3, _by_set_weights, marks=replicas.in_full),
        ("global_mean", "mean", 1, _by_checkpoint),
        ("global_mean", "mean", 3, _by_group_state),
        ("global_mean", "mean", 1, _by_set_weights),
    ],
)
def test_it_is_completed_on_another_number(
    maker, reduction, num_replicas, move, tmp_path
):
    after = _Training(maker, reduction, num_replicas)
    move(_begun(maker, reduction), after, tmp_path)
    after.step(SECOND, NUM_SECOND)
    expected = _expected(maker, reduction, [0, 1], list(range(num_replicas)))
    for value in replicas.values(after.strategy, after.weight):
        np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "maker, reduction",
    [
        ("global_mean", "mean"),
        pytest.param("agn", "sum", marks=replicas.in_full),
        pytest.param("tower_inside", "mean", marks=replicas.in_full),
    ],
)
def test_groups_of_two_are_completed_by_groups_of_one(
    maker, reduction, tmp_path
):
    """Each group's own round, divided over another number of replicas."""
    before = _begun(maker, reduction, 4, ((0, 3), (1, 2)))
    after = _Training(maker, reduction, 2, [[0], [1]])
    tf_xshard.GroupState(before.held).save(str(tmp_path))
    tf_xshard.GroupState(after.held).restore(
        str(tmp_path), regroup={0: 0, 1: 1}
    )
    after.step(SECOND, NUM_SECOND)
    for group, members in enumerate([[0, 3], [1, 2]]):
        value = replicas.values(after.strategy, after.weight)[group]
        expected = _expected(maker, reduction, members, [group])
        np.testing.assert_allclose(value, expected, rtol=1e-6)


ROUNDS = {
    "tower": lambda: tf_xshard.TowerOptimizer(SGD(1.0), 2),
    "agn_updates": lambda: tf_xshard.AGNOptimizer(
        SGD(1.0),
        communication_period=2,
        local_optimizer=SGD(1.0),
        accumulate="updates",
    ),
}


def _of_two(maker, sparse):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        variables = [
            keras.Variable(np.zeros([3, 1], "float32"), name=name)
            for name in "ab"
        ]
        optimizer = ROUNDS[maker]()
        optimizer.build(variables)

    def step(*present):
        def gradient(r):
            # Undoing 1/N makes this r + 1.
            value = np.float32(r + 1) / 2
            if sparse:
                return tf.IndexedSlices(
                    tf.fill([1, 1], value),
                    tf.constant([1]),
                    tf.constant([3, 1]),
                )
            return tf.fill([3, 1], value)

        replicas.apply_once(
            strategy,
            optimizer,
            lambda r: [gradient(r) for _ in present],
            [variables["ab".index(name)] for name in present],
        )

    return strategy, variables, optimizer, step


@pytest.mark.parametrize(
    "maker, sparse",
    [
        pytest.param("tower", False, marks=replicas.in_full),
        ("tower", True),
        ("agn_updates", False),
    ],
)
def test_a_gradient_from_before_a_restore_is_not_lost(maker, sparse, tmp_path):
    """The restored round goes on without a gradient of `b`."""
    _, variables, optimizer, step = _of_two(maker, sparse)
    step("a", "b")
    held = {"variables": variables, "optimizer": optimizer}
    path = tf.train.Checkpoint(**held).write(tmp_path / "state")
    strategy, variables, optimizer, step = _of_two(maker, sparse)
    held = {"variables": variables, "optimizer": optimizer}
    tf.train.Checkpoint(**held).read(path)
    step("a")
    # The mean gradient of two replicas is 1.5, once for `b` in two calls. The
    # file has replica 0's local variables only, and so its change of 1.
    want = (-1.25, -0.5) if maker == "agn_updates" else (-1.5, -0.75)
    rows = np.float32([[0], [1], [0]] if sparse else [[1], [1], [1]])
    for variable, change in zip(variables, want, strict=True):
        for value in replicas.values(strategy, variable):
            np.testing.assert_allclose(value, change * rows)
