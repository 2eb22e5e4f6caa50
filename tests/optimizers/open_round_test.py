"""An open round of TowerOptimizer, or period of AGNOptimizer, is saved on N
replicas and completed on another number of them."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import training

SGD = keras.optimizers.SGD
# The gradients of each replica, and how many rows have them.
FIRST, NUM_FIRST = np.float32([1, 10, 100, 1000]), [3, 1, 2, 4]
SECOND, NUM_SECOND = np.float32([7, 70, 700]), [1, 4, 2]


def _tower(reduction="mean", groups=None):
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
    """A model of one weight, trained on several replicas."""

    def __init__(self, maker, reduction="mean", num_replicas=2, groups=None):
        self.num_replicas = num_replicas
        self.strategy = replicas.mirrored(num_replicas)
        with self.strategy.scope():
            layer = keras.layers.Dense(1, use_bias=False)
            self.model = keras.Sequential([keras.layers.Input((1,)), layer])
            self.model.compile(MAKERS[maker](reduction, groups))
            self.model.optimizer.build(self.model.weights)
        [self.weight] = self.model.weights
        self.weight.assign([[0.0]])
        self._loss = None
        if maker == "global_mean":
            self._loss = tf_xshard.GlobalMean(lambda y, p: p, groups)

    def step(self, gradients, num_rows):
        def gradient(r):
            if self._loss is None:
                value = gradients[r] / self.num_replicas
                return [tf.reshape(value, (1, 1))]
            rows = tf.fill([num_rows[r], 1], gradients[r])
            with tf.GradientTape() as tape:
                value = self._loss(rows, rows * self.weight)
            return [tape.gradient(value, self.weight.value)]

        # A trace would take longer than the step.
        replicas.apply_once(
            self.strategy,
            self.model.optimizer,
            gradient,
            [self.weight],
            graph=False,
        )

    def check(self, expected):
        for value in replicas.values(self.strategy, self.weight):
            np.testing.assert_allclose(value, [[expected]], rtol=1e-6)


@functools.cache
def _begun(maker, reduction="mean", num_replicas=2, groups=None):
    """Half a round, in which `fit` ends."""
    begun = _Training(maker, reduction, num_replicas, groups)
    begun.step(FIRST, NUM_FIRST)
    if maker != "agn":
        begun.model.optimizer.finalize_variable_values([begun.weight])
    return begun


def _expected(maker, reduction, first, second):
    """After a round of the replicas `first`, and then `second`."""
    combine = getattr(np, reduction)
    if maker != "global_mean":
        return -(combine(FIRST[first]) + combine(SECOND[second])) / 2
    counts = [np.take(NUM_FIRST, first), np.take(NUM_SECOND, second)]
    total = counts[0] @ FIRST[first] + counts[1] @ SECOND[second]
    return -total / np.sum(np.concatenate(counts))


def _by_group_state(saved, new, directory, regroup="mean"):
    tf_xshard.GroupState(saved).save(directory)
    tf_xshard.GroupState(new).restore(directory, regroup=regroup)


def _by_set_weights(saved, new, directory):
    new.set_weights(saved.get_weights())
    new.optimizer.set_weights([v.numpy() for v in saved.optimizer.variables])


@pytest.mark.parametrize(
    "maker, reduction, num_replicas, move",
    [
        ("tower", "sum", 3, _by_group_state),
        ("tower_inside", "sum", 1, _by_set_weights),
        ("tower_inside", "mean", 3, training.by_checkpoint),
        ("agn", "sum", 1, _by_group_state),
        ("global_mean", "mean", 1, training.by_checkpoint),
        ("global_mean", "mean", 3, _by_group_state),
        ("global_mean", "mean", 1, _by_set_weights),
        ("global_mean", "mean", 3, training.by_keras_file),
    ],
)
def test_it_is_completed_on_another_number(
    maker, reduction, num_replicas, move, tmp_path
):
    after = _Training(maker, reduction, num_replicas)
    move(_begun(maker, reduction).model, after.model, tmp_path)
    after.step(SECOND, NUM_SECOND)
    own = list(range(num_replicas))
    after.check(_expected(maker, reduction, [0, 1], own))


@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_replaces_an_open_round_and_its_items(is_open, tmp_path):
    """Also a file from before the first step, which has no items."""
    saved = _begun("global_mean") if is_open else _Training("global_mean")
    used = _Training("global_mean")
    used.step(SECOND, NUM_SECOND)
    training.by_keras_file(saved.model, used.model, tmp_path)
    if not is_open:
        used.step(FIRST, NUM_FIRST)
    used.step(SECOND, NUM_SECOND)
    used.check(_expected("global_mean", "mean", [0, 1], [0, 1]))


def test_a_round_of_a_global_mean_is_not_continued_with_another_loss(tmp_path):
    new = _Training("tower")
    training.by_keras_file(_begun("global_mean").model, new.model, tmp_path)
    with pytest.raises(tf.errors.InvalidArgumentError, match="optimizer.reset"):
        new.step(SECOND, NUM_SECOND)


def test_groups_of_two_are_completed_by_groups_of_one(tmp_path):
    """Each group's own round, divided over another number of replicas."""
    case = "global_mean", "mean"
    before = _begun(*case, 4, ((0, 3), (1, 2)))
    after = _Training(*case, 2, [[0], [1]])
    _by_group_state(before.model, after.model, tmp_path, {0: 0, 1: 1})
    after.step(SECOND, NUM_SECOND)
    for group, members in enumerate([[0, 3], [1, 2]]):
        value = replicas.values(after.strategy, after.weight)[group]
        expected = _expected(*case, members, [group])
        np.testing.assert_allclose(value, [[expected]], rtol=1e-6)


def _agn_of_updates():
    return tf_xshard.AGNOptimizer(
        SGD(1.0),
        communication_period=2,
        local_optimizer=SGD(1.0),
        accumulate="updates",
    )


def _two_variables(make):
    """Two variables and their optimizer, on two replicas; and a step."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        held = {name: keras.Variable(tf.zeros([3, 1])) for name in "ab"}
        optimizer = make()
        optimizer.build([*held.values()])

    def gradient(r):
        # Undoing 1/N makes this r + 1.
        values = tf.fill([1, 1], np.float32(r + 1) / 2)
        return tf.IndexedSlices(values, tf.constant([1]), tf.constant([3, 1]))

    def step(*names):
        replicas.apply_once(
            strategy,
            optimizer,
            lambda r: [gradient(r) for _ in names],
            [held[name] for name in names],
        )

    return {**held, "optimizer": optimizer}, step


@pytest.mark.parametrize(
    "make, of_a, of_b",
    [
        (_tower, -1.5, -0.75),
        # The file has replica 0's local variables only, and so its change of 1.
        (_agn_of_updates, -1.25, -0.5),
    ],
    ids=["tower", "agn_updates"],
)
def test_a_gradient_from_before_a_restore_is_not_lost(
    make, of_a, of_b, tmp_path
):
    """The restored round goes on without a gradient of `b`.

    The mean gradient of two replicas is 1.5, once for `b` in two calls.
    """
    held, step = _two_variables(make)
    step("a", "b")
    path = tf.train.Checkpoint(**held).write(tmp_path / "state")
    held, step = _two_variables(make)
    tf.train.Checkpoint(**held).read(path)
    step("a")
    for name, change in (("a", of_a), ("b", of_b)):
        for value in replicas.values(replicas.mirrored(2), held[name]):
            np.testing.assert_allclose(value, [[0], [change], [0]])
