"""A collective that waits too long fails; what is watched is counted.

Each program has its own process, since a failure aborts its collectives.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import paths
from tests.support import replicas
from tf_xshard.collectives import watchdog

_SETUP = """
import threading
import time
import keras
import tensorflow as tf
import tf_xshard
from tf_xshard.cli import logical_devices
from tf_xshard.collectives import subgroups, transport, watchdog
from tf_xshard.distribute import site as site_lib

strategy = tf.distribute.MirroredStrategy(logical_devices.use_logical_cpus(2))

def made(timeout_seconds):
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0), "sum", loss_normalization="replica",
            communication=tf_xshard.Communication(
                timeout_seconds=timeout_seconds))
        optimizer.build([weight])
    return weight, optimizer

def values(weight):
    return [float(one)
            for one in strategy.experimental_local_results(weight.value)]

def replica_id():
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))

def summed(timeout_seconds, tensor):
    how = transport.Channel(
        tf_xshard.GroupAssignment([[0, 1]]),
        tf_xshard.Communication(timeout_seconds=timeout_seconds))
    return subgroups.Subgroups(site_lib.current(), how).sum([tensor])
"""


def _started(program):
    return subprocess.Popen(
        [sys.executable, "-c", _SETUP + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=paths.ROOT,
    )


def _output_of(process):
    """The lines that it prints until it ends, and its errors."""
    output, errors = process.communicate(timeout=500)
    return output.splitlines(), errors


def test_time_in_which_a_process_is_stopped_does_not_count():
    """It is stopped in a collective, for longer than the timeout."""
    process = _started("""
def slow(gradient):
    print("waiting", flush=True)
    for _ in range(30):
        time.sleep(0.05)
    return gradient

weight, optimizer = made(2.0)

@tf.function(autograph=False)
def waiting_step(g):
    def on_replica(g):
        if replica_id():
            g = tf.ensure_shape(tf.py_function(slow, [g], tf.float32), [])
        optimizer.apply([g], [weight])
    strategy.run(on_replica, args=(g,))

waiting_step(tf.constant(1.0))
print(values(weight))
""")
    timer = threading.Timer(90, process.kill)
    timer.start()
    assert process.stdout.readline() == "waiting\n", process.stderr.read()
    timer.cancel()
    time.sleep(0.5)  # Until the watchdog has seen that something waits.
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(process.pid, signal.SIGCONT)
    printed, errors = _output_of(process)
    assert printed == ["[-2.0, -2.0]"], errors[-3000:]


def test_threads_and_a_context_that_is_reset():
    """Models of the same shapes; after the reset, time goes on."""
    process = _started("""
from tensorflow.python.eager import context

def training(seconds):
    weight, optimizer = made(seconds)

    def on_replica(gradient):
        optimizer.apply([gradient * 10.0 ** replica_id()], [weight])

    step = tf.function(lambda g: strategy.run(on_replica, args=(g,)))
    return step, weight

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
print([values(weight) for _, weight in trained])

step, weight = training(1.0)
step(tf.constant(1.0))
print(values(weight))
context._reset_context()
devices = logical_devices.use_logical_cpus(2)
strategy = tf.distribute.MirroredStrategy(devices)
step, weight = training(1.0)
step(tf.constant(2.0))
time.sleep(1.5)
step(tf.constant(2.0))
print(values(weight))
""")
    printed, errors = _output_of(process)
    assert printed == [
        str([[-2200.0] * 2, [-4400.0] * 2, [-6600.0] * 2]),
        "[-11.0, -11.0]",
        "[-44.0, -44.0]",
    ], errors[-3000:]


# The two sleeps run one after the other: the first replica's collective waits 2
# seconds for the second's, 4 after the step began. Then nothing runs for 4, and
# nothing either after a step that has failed while a collective waited.
_SLOW_PROGRAM = """
weight, optimizer = made(3.5)
calls = []

def slow(seconds):
    calls.append(seconds)
    if seconds < 0 and len(calls) % 2 == 0:
        time.sleep(1.0)
        raise ValueError("of one replica")
    time.sleep(abs(float(seconds)))
    return 1.0

@tf.function(autograph=False)
def step(seconds):
    def on_replica():
        gradient = tf.py_function(slow, [seconds], tf.float32)
        optimizer.apply([tf.ensure_shape(gradient, []) / 2], [weight])
    strategy.run(on_replica)

def fail():
    try:
        step(tf.constant(-0.1))
    except tf.errors.OpError as error:
        assert "of one replica" in str(error), error

step(tf.constant(0.0))
start = time.monotonic()
step(tf.constant(2.0))
assert time.monotonic() - start > 3.9
time.sleep(4.0)
fail()
time.sleep(4.0)
# A computation without collectives, such as an evaluation.
tf.function(lambda: tf.py_function(slow, [4.5], tf.float32))()
step(tf.constant(0.0))
fail()

# At once the next step, in which nothing waits at first.
@tf.function(autograph=False)
def late_step():
    first = tf.py_function(slow, [4.5], tf.float32)
    with tf.control_dependencies([first]):
        zero = tf.constant(0.0)
    step(zero)

late_step()
step(tf.constant(0.0))
print(values(weight))
"""

# Replica 1 never takes part.
_MISSING_PROGRAM = """
@tf.function(autograph=False)
def sum_of(both):
    def on_replica():
        if replica_id() == 0 or both:
            summed(2, tf.constant(1.0))
    strategy.run(on_replica)

sum_of(True)
start = time.monotonic()
try:
    sum_of(False)
except tf.errors.DeadlineExceededError as error:
    assert 2 <= time.monotonic() - start < 6, time.monotonic() - start
    assert "waited longer than 2.0 seconds" in str(error), error
    print("ended")
"""


def test_only_a_missing_replica_is_an_error_after_the_timeout():
    """Neither time between steps, nor inputs, nor a step that failed."""
    printed, errors = _output_of(_started(_SLOW_PROGRAM + _MISSING_PROGRAM))
    assert printed == ["[-5.0, -5.0]", "ended"], errors[-3000:]
    # Also where nobody catches the error.
    assert "waited longer than 2.0 seconds for the other" in errors


# What TensorFlow itself waits for has no timeout. Tracing does not count.
_STUCK_PROGRAM = """
def wait(seconds):
    time.sleep(float(seconds))
    return seconds

@tf.function(autograph=False)
def step(seconds):
    time.sleep(3.0)
    data = tf.ensure_shape(tf.py_function(wait, [seconds], tf.float32), [])
    strategy.run(lambda: summed(300, data))

batch = watchdog.WatchedBatch(2.0)
batch.begin()
step(tf.constant(0.0))
batch.end()
step(tf.constant(4.0))
for _ in range(4):
    batch.begin()
    step(tf.constant(1.0))
    batch.end()
batch.begin()
try:
    step(tf.constant(4.0))
except tf.errors.DeadlineExceededError as error:
    assert "A batch waited longer than 2.0 seconds" in str(error), error
    print("ended")
"""


def test_a_batch_that_stands_still_is_an_error_after_the_timeout():
    printed, errors = _output_of(_started(_STUCK_PROGRAM))
    assert printed == ["ended"], errors[-3000:]


def _num_threads():
    with open("/proc/self/status") as status:
        [line] = [one for one in status if one.startswith("Threads:")]
    return int(line.split()[1])


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="needs Linux"
)
def test_a_timeout_costs_no_threads():
    """TensorFlow's own starts two per collective, for the whole timeout."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.SGD())
        optimizer.build([weight])

    @tf.function(autograph=False)
    def step():
        strategy.run(lambda: optimizer.apply([tf.constant(1.0)], [weight]))

    step()
    before = _num_threads()
    for _ in range(50):
        step()
    assert _num_threads() <= before + 10
    watchdogs = [
        thread
        for thread in threading.enumerate()
        if thread.name == "tf_xshard_watchdog"
    ]
    assert len(watchdogs) == 1


def test_looking_at_threads_collects_no_garbage():
    """Before Python 3.11.9, all threads of the process would wait forever."""
    process = _started("""
import gc
import os
from tf_xshard.private.tensorflow import runtime

class Garbage:
    def __init__(self):
        self.itself, self.local = self, threading.local()
        self.local.value = 1

    def __del__(self):
        Garbage()  # There is always more.

def wait():
    threading.Event().wait()  # In a frame that nothing has looked at.

for _ in range(4):
    threading.Thread(target=wait, daemon=True).start()
thresholds = gc.get_threshold()
Garbage()
gc.set_threshold(1)
assert not runtime.a_function_runs()
gc.set_threshold(*thresholds)
print(gc.isenabled())
gc.disable()
assert not runtime.a_function_runs()
print(gc.isenabled(), flush=True)
os._exit(0)
""")
    timer = threading.Timer(90, process.kill)
    timer.start()
    output, errors = _output_of(process)
    timer.cancel()
    assert output == ["True", "False"], errors


def test_a_failed_call_does_not_count_for_the_next_one(monkeypatch):
    """Even if the watchdog looks before the call has reset the count."""
    waiting = object.__new__(watchdog._Waiting)
    waiting._graph, waiting._count = object(), None
    waiting._last, waiting._since = 0, 0.0
    monkeypatch.setattr(
        watchdog.runtime_variables, "read", lambda handle, dtype: 5
    )
    for now, runs, seconds in (
        (1.0, True, 0.0),
        (3.0, False, 0.0),
        (9.0, False, 0.0),
        (10.0, True, 1.0),
        (12.0, True, 3.0),
        (12.5, True, 3.5),
    ):
        monkeypatch.setattr(
            watchdog.runtime, "a_function_uses", lambda handle, runs=runs: runs
        )
        assert waiting.seconds(now) == seconds, now


def test_a_graph_of_tf1_is_not_counted_when_it_is_built():
    tf1 = tf.compat.v1
    before = watchdog.WATCHDOG.totals()
    with tf.Graph().as_default():
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            weight = tf1.get_variable(
                "weight", [2], initializer=tf1.zeros_initializer()
            )
            optimizer = tf_xshard.compat.v1.CrossShardOptimizer(
                tf1.train.GradientDescentOptimizer(1.0)
            )
            step = strategy.run(
                lambda: optimizer.apply_gradients([(tf.ones([2]), weight)])
            )
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            session.run(strategy.experimental_local_results(step))
            for value in session.run(list(weight.values)):
                np.testing.assert_array_equal(value, [-2.0, -2.0])
    assert watchdog.WATCHDOG.totals() == before
