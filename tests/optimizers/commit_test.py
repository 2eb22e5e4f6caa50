"""A call writes nothing before its gradients and reductions exist.

No race is needed: the tests read the traced graph of each path, with its
branches. Every write must have every replica's gradients of all variables among
its ancestors, and the reductions of its own replica.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import writes

NUM_VARIABLES = 2
GROUPS = [[0, 3], [1, 2]]
Cross = tf_xshard.CrossShardOptimizer
Tower = tf_xshard.TowerOptimizer
AGN = tf_xshard.AGNOptimizer


def adam(**kwargs):
    return keras.optimizers.Adam(0.1, **kwargs)


def int8():
    return tf_xshard.Communication(dtype="int8", error_feedback=True)


def agn(inner=adam, **kwargs):
    return AGN(inner(), communication_period=2, **kwargs)


PATHS = {
    "hooks, clip, decay, averages": lambda: Cross(
        keras.optimizers.AdamW(
            0.1, global_clipnorm=1.0, use_ema=True, ema_overwrite_frequency=2
        ),
        pre_reduce=tf_xshard.clip_by_norm(1.0),
        post_reduce=tf_xshard.clip_by_global_norm(1.0),
    ),
    "nested groups, accumulation": lambda: Cross(
        Cross(adam(gradient_accumulation_steps=2), group_assignment=GROUPS),
        group_assignment=[[0, 1], [2, 3]],
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
    "tower, int8": lambda: Tower(Cross(adam(), communication=int8()), 2),
    "tower, skip": lambda: Tower(
        adam(), 2, skip_nonfinite=True, max_consecutive_skips=1
    ),
    "tower, loss scale": lambda: Tower(
        Cross(keras.optimizers.LossScaleOptimizer(adam())), 2
    ),
    "cross of towers, skip": lambda: Cross(
        Tower(Tower(adam(), 2), 1), skip_nonfinite=True
    ),
    "AGN, groups": lambda: agn(accumulate="updates", group_assignment=GROUPS),
    "AGN, int8": lambda: agn(communication=int8()),
    "AGN, skip": lambda: agn(skip_nonfinite=True, max_consecutive_skips=1),
    "tower of AGN": lambda: Tower(agn(), 2),
    "cross of AGN, groups": lambda: Cross(agn(), group_assignment=GROUPS),
}
if hasattr(keras.optimizers, "MultiOptimizer"):
    PATHS["several"] = lambda: Cross(
        keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(
                adam(), {"w0": keras.optimizers.SGD(0.1, momentum=0.9)}
            )
        )
    )


def of_step(make, strategy, in_branch=False):
    """The writes of a step in which every gradient is an argument."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        weights = [
            keras.Variable(np.ones((3, 2), "float32"), name=f"w{i}")
            for i in range(NUM_VARIABLES)
        ]
        optimizer = make()
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
        if strategy is None:
            on_replica(*data)
        else:
            strategy.run(on_replica, args=data)

    data = [tf.constant(1.0)] * NUM_VARIABLES
    if strategy is not None:
        data = [
            strategy.experimental_distribute_values_from_function(
                lambda context: tf.constant(1.0)
            )
            for _ in data
        ]
    num_replicas = strategy.num_replicas_in_sync if strategy else 1
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


def early(found):
    # The norms of a sharded update are sums of what this step updates with.
    return [
        one
        for one in found
        if one.missing_arguments
        or any("/adam" not in name for name in one.missing_reductions)
    ]


# What they add to the others is a combination.
IN_FULL = (
    *("loss scale", "tower, int8", "tower, loss scale", "tower of AGN"),
    *("AGN, int8", "several", "nested groups, accumulation"),
)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=replicas.in_full if path in IN_FULL else ())
        for path in PATHS
    ],
)
def test_writes_wait_for_all_replicas(path):
    num_replicas = 4 if "groups" in path else 2
    found = of_step(PATHS[path], replicas.mirrored(num_replicas))
    assert not early(found)


@pytest.mark.parametrize(
    "path, kind",
    replicas.in_turn(
        ["hooks, clip, decay, averages", "int8, skip", "tower, skip", "AGN"],
        ["none", "one_device", "one_replica"],
    ),
)
def test_writes_wait_without_replicas(path, kind):
    strategy = {
        "none": lambda: None,
        "one_device": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
        "one_replica": lambda: replicas.mirrored(1),
    }[kind]()
    make = PATHS[path] if path != "AGN" else agn
    assert not early(of_step(make, strategy))


@pytest.mark.parametrize("path", ["loss scale", "tower", "AGN", "owned, int8"])
def test_in_a_branch_writes_wait_for_their_own_replica(path):
    # merge_call, through which replicas wait for each other, can't run there.
    make = PATHS[path] if path != "AGN" else agn
    found = of_step(make, replicas.mirrored(2), in_branch=True)
    for one in found:
        assert not one.missing_reductions, one
        # The arguments are those of both replicas, in turn.
        own = [i for i in one.missing_arguments if i % 2 == one.replica]
        assert not own, one
