"""Plan, ledger and wire on four processes, for multi_worker_program.py."""

import time

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tests.support import counting
from tests.support import fitting
from tests.support import training
from tf_xshard.collectives import watchdog

NUM_FLOATS = 1 << 20
NUM_STEPS = 4
NUM_ROUNDS = 2
CROSSED = [[0, 2], [1, 3]]


def _cross_shard(dtype=None, error_feedback=False, **kwargs):
    return tf_xshard.CrossShardOptimizer(
        keras.optimizers.SGD(1.0),
        communication=tf_xshard.Communication(
            dtype=dtype, error_feedback=error_feedback
        ),
        **kwargs,
    )


OPTIMIZERS = {
    "all": _cross_shard,
    "groups": lambda: _cross_shard(group_assignment=CROSSED),
    "sharded": lambda: _cross_shard(shard_update=True),
    "bfloat16": lambda: _cross_shard("bfloat16"),
    "int8": lambda: _cross_shard("int8", True),
    "int8 sharded": lambda: _cross_shard("int8", True, shard_update=True),
}


def _bytes_sent(strategy, make):
    """Of all workers in NUM_STEPS: planned, counted, and on the wire."""
    with strategy.scope():
        weight = keras.Variable(np.zeros(NUM_FLOATS), dtype="float32")
        optimizer = make()
        optimizer.build([weight])
    # On one worker alone: nothing runs, so none waits for another.
    plan = None
    if tf_xshard.is_chief(strategy):
        plan = tf_xshard.communication_plan(optimizer)

    @tf.function(autograph=False)
    def step():
        strategy.run(lambda: optimizer.apply([tf.ones([NUM_FLOATS])], [weight]))

    for _ in range(NUM_STEPS):
        step()
    wire = []
    for _ in range(NUM_ROUNDS):
        tf_xshard.barrier(strategy)
        before = counting.loopback_bytes()
        # None of the others begins before that was read.
        tf_xshard.barrier(strategy)
        counted = watchdog.WATCHDOG.totals()
        for _ in range(NUM_STEPS):
            step()
        after = watchdog.WATCHDOG.totals()
        # The others may be later than this one.
        tf_xshard.barrier(strategy)
        time.sleep(0.25)
        wire.append(counting.loopback_bytes() - before)
    if plan is None:
        return None
    workers = strategy.num_replicas_in_sync
    return {
        "planned": plan.bytes_sent_per_step * NUM_STEPS * workers,
        "counted": (after.bytes_sent - counted.bytes_sent) * workers,
        # Other programs may use the interface, too.
        "wire": min(wire),
        "collectives": [
            plan.collectives_per_step * NUM_STEPS,
            after.collectives - counted.collectives,
        ],
    }


def _fit(strategy):
    """Two epochs of `fit`: the plan for one, and what was logged."""
    with strategy.scope():
        model = training.model()
        model.compile(_cross_shard(group_assignment=CROSSED), "mse")
    plan = tf_xshard.communication_plan(model)
    with tf_xshard.multi_worker_fit():
        logged = fitting.fit(
            model,
            [tf_xshard.CommunicationLedger()],
            xy=training.data(),
            batch_size=64,
        )
    steps = 4
    return {
        "planned": [
            plan.collectives_per_step * steps,
            plan.bytes_per_step * steps,
            plan.bytes_sent_per_step * steps,
        ],
        "logged": [
            logged[f"communication_{name}"]
            for name in ("collectives", "bytes", "bytes_sent", "seconds")
        ],
    }


def run(strategy):
    return {
        "sent": {
            name: _bytes_sent(strategy, make)
            for name, make in OPTIMIZERS.items()
        },
        "fit": _fit(strategy),
    }
