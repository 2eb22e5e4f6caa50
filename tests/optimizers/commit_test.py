"""A call writes nothing before its gradients and reductions exist.

No race is needed: the tests read the traced graph of each path, with its
branches. Every write must have every replica's gradients of all variables among
its ancestors, and the reductions of its own replica.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import training
from tests.support import writes

NUM_VARIABLES = 2
GROUPS = [[0, 3], [1, 2]]
Cross = tf_xshard.CrossShardOptimizer
Tower = tf_xshard.TowerOptimizer


def adam(**kwargs):
    return keras.optimizers.Adam(0.1, **kwargs)


def int8():
    return tf_xshard.Communication(dtype="int8", error_feedback=True)


def agn(**kwargs):
    return tf_xshard.AGNOptimizer(adam(), communication_period=2, **kwargs)


PATHS = {
    "hooks, clip, decay, averages": lambda: Cross(
        keras.optimizers.AdamW(
            0.1, global_clipnorm=1.0, use_ema=True, ema_overwrite_frequency=2
        ),
        pre_reduce=tf_xshard.clip_by_norm(1.0),
        post_reduce=tf_xshard.clip_by_global_norm(1.0),
    ),
    "local, skip, limit": lambda: Cross(
        adam(), local="w0", skip_nonfinite=True, max_consecutive_skips=3
    ),
    "loss scale": lambda: Cross(keras.optimizers.LossScaleOptimizer(adam())),
    "int8, skip": lambda: Cross(
        adam(), communication=int8(), skip_nonfinite=True
    ),
    "sharded, groups, clip": lambda: Cross(
        adam(global_clipnorm=1.0), group_assignment=GROUPS, shard_update=True
    ),
    "sharded, int8, accumulation": lambda: Cross(
        adam(gradient_accumulation_steps=2),
        shard_update=True,
        communication=int8(),
    ),
    "owned, int8": lambda: Cross(
        keras.optimizers.Adafactor(0.1), shard_update=True, communication=int8()
    ),
    "tower": lambda: Tower(adam(), 2),
    "tower, skip": lambda: Tower(
        adam(), 2, skip_nonfinite=True, max_consecutive_skips=1
    ),
    "AGN, groups": lambda: agn(accumulate="updates", group_assignment=GROUPS),
    "AGN, skip": lambda: agn(skip_nonfinite=True, max_consecutive_skips=1),
    "cross of AGN, groups": lambda: Cross(agn(), group_assignment=GROUPS),
}


def of_step(path, strategy, in_branch=False):
    """The writes of a step in which every gradient is an argument."""
    with strategy.scope():
        weights = [
            keras.Variable(np.ones((3, 2), "float32"), name=f"w{i}")
            for i in range(NUM_VARIABLES)
        ]
        optimizer = PATHS[path]()
        optimizer.build(weights)

    def on_replica(*data):
        gradients = [
            one * weight.value
            for one, weight in zip(data, weights, strict=True)
        ]

        def apply():
            optimizer.apply(gradients, weights)
            return tf.constant(True)

        if in_branch:
            tf.cond(data[0] > 0, apply, lambda: tf.constant(False))
        else:
            apply()

    @tf.function(autograph=False)
    def step(*data):
        strategy.run(on_replica, args=data)

    num_replicas = strategy.num_replicas_in_sync
    ones = [1.0] * num_replicas
    data = [training.per_replica(strategy, ones) for _ in weights]
    found = writes.read(
        step.get_concrete_function(*data),
        NUM_VARIABLES * num_replicas,
        [*weights, *optimizer.variables],
    )
    # Every replica writes its weights.
    assert {(w.path, r) for w in weights for r in range(num_replicas)} <= {
        (one.variable, one.replica) for one in found
    }
    return found


@pytest.mark.parametrize("path", PATHS)
def test_writes_wait_for_all_replicas(path):
    num_replicas = 4 if "groups" in path else 2
    for one in of_step(path, replicas.mirrored(num_replicas)):
        assert not one.missing_arguments, one
        # The norms of a sharded update are sums of what this step updates with.
        assert all("/adam" in name for name in one.missing_reductions), one


@pytest.mark.parametrize(
    "path", ["loss scale", "tower", "AGN, skip", "owned, int8"]
)
def test_in_a_branch_writes_wait_for_their_own_replica(path):
    # merge_call, through which replicas wait for each other, can't run there.
    for one in of_step(path, replicas.mirrored(2), in_branch=True):
        assert not one.missing_reductions, one
        # The arguments are those of both replicas, in turn.
        own = [i for i in one.missing_arguments if i % 2 == one.replica]
        assert not own, one
