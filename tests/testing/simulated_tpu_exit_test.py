"""How programs on the simulated TPU begin and end."""

import json
import subprocess
import threading
import time

from tests.support import processes
from tests.support import replicas

_UNFINISHED = """
import time
import keras
import numpy as np
import tensorflow as tf
from tf_xshard import testing

strategy = testing.simulated_tpu_strategy(8)
x = np.zeros([4096, 16], "float32")
data = tf.data.Dataset.from_tensor_slices(x).shuffle(1000).repeat()
data = data.batch(64, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
iterator = iter(strategy.experimental_distribute_dataset(data))

@tf.function
def step(iterator):
    return strategy.run(tf.reduce_sum, args=(next(iterator),))

for _ in range(20):
    step(iterator)
# Threads that tune buffers sleep longer and longer.
time.sleep(12)
print("ended", flush=True)
"""


@replicas.in_full
def test_a_program_with_an_unfinished_iterator_ends_soon():
    """By default, `test_only_its_own_iterators_are_untuned` looks why."""
    with processes.started(
        processes.python("-c", _UNFINISHED),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        timer = threading.Timer(90, process.kill)
        timer.start()
        assert process.stdout.readline() == "ended\n"
        timer.cancel()
        start = time.monotonic()
        assert process.wait(120) == 0
        # 4 s, 9 s on a busy machine, and over 80 s if such a thread sleeps.
        assert time.monotonic() - start < 25


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
try:
    testing.simulated_tpu_strategy(4)
except RuntimeError as error:
    message = str(error)
print(json.dumps([got, devices, len(jax.devices()), message]), flush=True)

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
    got, before, after, message = json.loads(result.stdout.splitlines()[-1])
    assert got == [6.0] * 3
    assert before == after
    assert "needs 4 logical CPUs, but TensorFlow already runs with 3" in message
    assert result.returncode < 0
    assert "Termination timeout for `all reduce" in result.stderr
