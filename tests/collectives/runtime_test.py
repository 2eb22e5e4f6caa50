"""Stopped processes, threads, and a context that is reset.

Each program has its own process, since a failure aborts its collectives.
"""

import os
import signal
import subprocess
import sys
import threading
import time

from tests.support import paths

_SETUP = """
import threading
import keras
import tensorflow as tf
import tf_xshard
from tf_xshard.cli import logical_devices

devices = logical_devices.use_logical_cpus(2)
strategy = tf.distribute.MirroredStrategy(devices)

def training(seconds=60.0):
    with strategy.scope():
        weight = keras.Variable([0.0, 0.0])
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0), "sum", loss_normalization="replica",
            communication=tf_xshard.Communication(timeout_seconds=seconds))
        optimizer.build([weight])

    def on_replica(gradient):
        gradient = gradient * tf.cast(1 + 9 * tf.cast(
            tf.distribute.get_replica_context().replica_id_in_sync_group,
            tf.int32), tf.float32)
        optimizer.apply([tf.fill([2], gradient)], [weight])

    step = tf.function(lambda g: strategy.run(on_replica, args=(g,)))
    return step, lambda: [
        one.numpy().tolist()
        for one in strategy.experimental_local_results(weight.value)]
"""


def _python(program):
    return subprocess.Popen(
        [sys.executable, "-c", _SETUP + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=paths.ROOT,
    )


def _printed(process):
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors[-3000:]
    return output.split("\n")[-2]


def test_time_in_which_a_process_is_stopped_does_not_count():
    """It is stopped in a collective, for longer than the timeout."""
    process = _python("""
import time
def slow(gradient):
    print("waiting", flush=True)
    for _ in range(30):
        time.sleep(0.05)
    return gradient

with strategy.scope():
    weight = keras.Variable(0.0)
    optimizer = tf_xshard.CrossShardOptimizer(
        keras.optimizers.SGD(1.0), "sum", loss_normalization="replica",
        communication=tf_xshard.Communication(timeout_seconds=2.0))
    optimizer.build([weight])

@tf.function(autograph=False)
def waiting_step(g):
    def on_replica(g):
        r = tf.distribute.get_replica_context().replica_id_in_sync_group
        if int(tf.get_static_value(r)):
            g = tf.ensure_shape(tf.py_function(slow, [g], tf.float32), [])
        optimizer.apply([g], [weight])
    strategy.run(on_replica, args=(g,))

waiting_step(tf.constant(1.0))
print([one.numpy() for one in
       strategy.experimental_local_results(weight.value)] == [-2.0, -2.0])
""")
    timer = threading.Timer(90, process.kill)
    timer.start()
    assert process.stdout.readline() == "waiting\n", process.stderr.read()
    timer.cancel()
    time.sleep(0.5)  # Until the watchdog has seen that something waits.
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(process.pid, signal.SIGCONT)
    assert _printed(process) == "True"


def test_threads_train_models_of_the_same_shapes():
    process = _python("""
trained = [training(20.0) for _ in range(3)]
errors = []

def train(index):
    try:
        for _ in range(200):
            trained[index][0](tf.constant(float(index + 1)))
    except Exception as error:
        errors.append(error)

threads = [threading.Thread(target=train, args=(i,)) for i in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors, errors
print([values()[0][0] for _, values in trained],
      all(values()[0] == values()[1] for _, values in trained))
""")
    assert _printed(process) == "[-2200.0, -4400.0, -6600.0] True"


def test_a_context_that_is_reset():
    process = _python("""
import time
from tensorflow.python.eager import context
step, values = training(1.0)
step(tf.constant(1.0))
before = values()
context._reset_context()
devices = logical_devices.use_logical_cpus(2)
strategy = tf.distribute.MirroredStrategy(devices)
step, values = training(1.0)
step(tf.constant(2.0))
time.sleep(1.5)
step(tf.constant(2.0))
print(before[1][0], values()[1][0])
""")
    assert _printed(process) == "-11.0 -44.0"
