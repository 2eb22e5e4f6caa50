"""Plan, ledger and wire on four processes, for multi_worker_program.py."""

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tests.support import cluster
from tf_xshard.collectives import watchdog

NUM_FLOATS = 1 << 18
NUM_CALLS = 4
OPTIMIZERS = {
    "towers": lambda: tf_xshard.TowerOptimizer(
        keras.optimizers.SGD(1.0), NUM_CALLS
    ),
    "int8 sharded": lambda: tf_xshard.CrossShardOptimizer(
        keras.optimizers.SGD(1.0),
        shard_update=True,
        communication=tf_xshard.Communication("int8", error_feedback=True),
    ),
}


def _bytes_sent(strategy, make):
    """Of this worker in NUM_CALLS: planned, counted, and on the wire."""
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

    for _ in range(NUM_CALLS):
        step()
    counted, wire = np.zeros([NUM_CALLS, 2], int), []
    for call in range(NUM_CALLS):
        tf_xshard.barrier(strategy)
        before = watchdog.WATCHDOG.totals()
        sent = cluster.bytes_sent()
        step()
        after = watchdog.WATCHDOG.totals()
        # This worker has sent everything once the others have got it.
        tf_xshard.barrier(strategy)
        wire.append(cluster.bytes_sent() - sent)
        counted[call] = (
            after.collectives - before.collectives,
            after.bytes_sent - before.bytes_sent,
        )
    return {
        "planned": plan
        and [
            NUM_CALLS * plan.collectives_per_step,
            NUM_CALLS * plan.bytes_sent_per_step,
        ],
        "counted": counted.sum(axis=0).tolist(),
        "wire": wire,
    }


def ledger(strategy):
    return {
        name: _bytes_sent(strategy, make) for name, make in OPTIMIZERS.items()
    }
