"""How a program on the simulated TPU begins and ends."""

import json

from tests.support import processes

_MISSES = """
import json
import jax
import tensorflow as tf
from tf_xshard import testing
devices = len(jax.devices())
strategy = testing.simulated_tpu_strategy(3)
step = tf.function(lambda: strategy.run(
    lambda: tf.distribute.get_replica_context().all_reduce("SUM", 2.0)))
got = [float(v) for v in strategy.experimental_local_results(step())]
print(json.dumps([got, devices, len(jax.devices())]), flush=True)

def on_replica():
    context = tf.distribute.get_replica_context()
    return tf.while_loop(
        lambda i, y: i < context.replica_id_in_sync_group,
        lambda i, y: (i + 1, context.all_reduce("SUM", y)),
        [0, tf.ones([2])],
    )[1]
tf.function(lambda: strategy.run(on_replica))()
"""


def test_a_new_process_that_some_replicas_keep_waiting():
    """It needs one call: no flag, no logical CPUs; others may have used jax.

    A collective that some replicas miss ends it; a TPU would hang. One
    replica's loop runs more often than another's.
    """
    result = processes.run(processes.python("-c", _MISSES), 300)
    got, before, after = json.loads(result.stdout.splitlines()[-1])
    assert got == [6.0] * 3
    assert before == after
    assert result.returncode < 0
    assert "Termination timeout for `all reduce" in result.stderr
