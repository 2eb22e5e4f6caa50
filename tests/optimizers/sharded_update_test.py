"""shard_update=True: the numbers of one device, from shards and from owners."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import sharded
from tests.support import steps
from tests.support import versions

O = keras.optimizers  # noqa: E741
PAIRS = sharded.PAIRS
BY_ELEMENT, OWNED = sharded.BY_ELEMENT, sharded.OWNED


@pytest.mark.parametrize(
    "inner_fns, variables",
    [
        (BY_ELEMENT[::2], sharded.ONE),
        (BY_ELEMENT[1::2], sharded.ONE),
        (OWNED, sharded.TWO),
        pytest.param(
            [sharded.multi],
            tuple(sharded.SHAPES),
            marks=versions.needs_multi_optimizer,
        ),
    ],
    ids=["by_element", "others", "owned", "multi"],
)
def test_every_optimizer_is_one_device(inner_fns, variables):
    sharded.check(inner_fns, replicas.mirrored(2), names=variables)


@pytest.mark.parametrize(
    "name, kind, devices, groups",
    [
        ("schedule_decay_clipvalue", "mirrored", (0, 1), None),
        ("static_scale", "mirrored", (0, 1), None),
        ("scale", "mirrored", replicas.MIXED, PAIRS),
        ("accumulation_ema", "tpu", 2, None),
        ("accumulation", "tpu_permuted", 4, PAIRS),
        # The identity.
        ("averages", "mirrored", (0, 1), [[0], [1]]),
    ],
    ids=["elements", "clipnorm", "scale", "tpu", "tpu_permuted", "alone"],
)
def test_settings_are_one_devices(name, kind, devices, groups):
    """On devices in any order and number."""
    is_mirrored = kind == "mirrored"
    make = replicas.mirrored_on if is_mirrored else replicas.STRATEGIES[kind]
    both = sharded.of_both_kinds(name)
    sharded.check(both, make(devices), groups)


def test_constraints_are_of_whole_variables():
    sharded.check(
        sharded.of_both_kinds("accumulation_ema"),
        replicas.mirrored(2),
        constraint=keras.constraints.MaxNorm(0.4, axis=0),
    )


def test_hooks_see_whole_gradients():
    """A hook that clips is one device's `clipnorm`."""
    momentum = functools.partial(sharded.momentum, O.SGD)
    sharded.check(
        [functools.partial(sharded.momentum, kind) for kind in sharded.KINDS],
        replicas.mirrored(2),
        expected=functools.partial(momentum, clipnorm=0.05),
        post_reduce=tf_xshard.clip_by_norm(0.05),
    )


@pytest.mark.parametrize(
    "kind, graph", replicas.in_turn(sharded.KINDS, [True, False])
)
def test_none_and_sparse_gradients(kind, graph):
    """Each group has another pattern; a variable without one stays."""

    def gradients(r):
        rows = tf.IndexedSlices(tf.fill([3, 3], r + 1.0), [4, r, 4], [5, 3])
        return [rows, None, tf.fill([3], 100.0) if r == 2 else None]

    with pytest.warns(UserWarning, match="Gradients do not exist"):
        found = steps.stepped(
            lambda: tf_xshard.CrossShardOptimizer(
                kind(0.1, weight_decay=0.1),
                "mean",
                PAIRS,
                loss_normalization="replica",
                shard_update=True,
            ),
            gradients,
            [np.ones([5, 3]), np.ones(3), np.ones(3)],
            graph=graph,
        )
    for members in PAIRS:
        rows = np.zeros([5, 1])
        for m in members:
            np.add.at(rows, [4, m, 4], (m + 1) / 2)
        # Weight decay takes 1 % of what has a gradient.
        expected = (0.99 - 0.1 * rows, 1, -4.01 if 2 in members else 1)
        for variable, want in zip(found, expected, strict=True):
            for r in members:
                got = variable[r]
                want = np.broadcast_to(want, got.shape)
                np.testing.assert_allclose(got, want, atol=1e-6)


def test_an_overflow_on_one_replica_is_skipped_by_all():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(tf.ones([5]))
        weight.constraint = keras.constraints.MaxNorm(0.1)
        optimizer = tf_xshard.CrossShardOptimizer(
            O.LossScaleOptimizer(O.SGD(1.0), initial_scale=8.0),
            shard_update=True,
        )
    # The overflow is in the shard of replica 0. Weights are constrained as a
    # whole, once they are updated.
    for last, norm in ((np.inf, np.sqrt(5)), (8.0, 0.1)):
        replicas.apply_once(
            strategy,
            optimizer,
            lambda r, last=last: [
                tf.constant([last if r else 8.0, 8, 8, 8, 8])
            ],
            [weight],
        )
        for value in replicas.values(strategy, weight):
            np.testing.assert_allclose(np.linalg.norm(value), norm, rtol=1e-5)


def test_exclusion_from_weight_decay_by_list():
    """The user names the whole variables, not their shards."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        kept, decayed = (keras.Variable(tf.ones([3])) for _ in range(2))
        inner = O.AdamW(0.1, weight_decay=0.5)
        inner.exclude_from_weight_decay(var_list=[kept])
        optimizer = tf_xshard.CrossShardOptimizer(inner, shard_update=True)
        optimizer.build([kept, decayed])
    strategy.run(lambda: optimizer.apply([tf.zeros([3])] * 2, [kept, decayed]))
    for variable, want in ((kept, 1.0), (decayed, 0.95)):
        for value in replicas.values(strategy, variable):
            np.testing.assert_allclose(value, np.full(3, want), rtol=1e-6)
