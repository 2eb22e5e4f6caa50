"""A collective that waits too long fails, and the timeout costs no threads."""

import os
import subprocess
import sys
import threading
import types

import keras
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import paths
from tests.support import replicas
from tf_xshard.collectives import watchdog


def _run(program):
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=paths.ROOT,
    )


# Replica 1 never takes part. The failure aborts the process's collectives,
# hence a process of its own.
_PROGRAM = """
import time
import tensorflow as tf
from tf_xshard import communication, group_assignment
from tf_xshard.cli import logical_devices
from tf_xshard.distribute import site as site_lib
from tf_xshard.collectives import channel
from tf_xshard.collectives import subgroups

strategy = tf.distribute.MirroredStrategy(logical_devices.use_logical_cpus(2))
groups = group_assignment.GroupAssignment([[0, 1]])

@tf.function(autograph=False)
def step(both):
    def on_replica():
        site = site_lib.current()
        if site.replica_id == 0 or both:
            how = communication.Communication(timeout_seconds=2)
            subgroups.Subgroups(site, channel.Channel(groups, how)).sum(
                [tf.constant(1.0)]
            )
    strategy.run(on_replica)

step(True)
start = time.monotonic()
try:
    step(False)
except tf.errors.DeadlineExceededError as error:
    assert 2 <= time.monotonic() - start < 6, time.monotonic() - start
    assert "waited longer than 2.0 seconds" in str(error), error
    print("ended")
"""


def test_a_missing_replica_is_an_error_after_the_timeout():
    run = _run(_PROGRAM)
    assert run.stdout.strip().endswith("ended"), run.stderr[-3000:]
    # Also where nobody catches the error.
    assert "waited longer than 2.0 seconds for the other" in run.stderr


# What TensorFlow itself waits for has no timeout. Tracing does not count.
_STUCK_PROGRAM = """
import time
import tensorflow as tf
from tf_xshard import communication, group_assignment
from tf_xshard.cli import logical_devices
from tf_xshard.distribute import site as site_lib
from tf_xshard.collectives import subgroups, watchdog

strategy = tf.distribute.MirroredStrategy(logical_devices.use_logical_cpus(2))
groups = group_assignment.GroupAssignment([[0, 1]])

def wait(seconds):
    time.sleep(float(seconds))
    return seconds

@tf.function(autograph=False)
def step(seconds):
    time.sleep(3.0)
    data = tf.ensure_shape(tf.py_function(wait, [seconds], tf.float32), [])
    how = channel.Channel(groups, communication.Communication())
    strategy.run(
        lambda: subgroups.Subgroups(site_lib.current(), how).sum([data])
    )

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
    run = _run(_STUCK_PROGRAM)
    assert run.stdout.strip() == "ended", run.stderr[-3000:]


def _num_threads():
    with open("/proc/self/status") as status:
        [line] = [one for one in status if one.startswith("Threads:")]
    return int(line.split()[1])


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="needs Linux"
)
def test_a_timeout_costs_no_threads():
    """TensorFlow's own starts two per collective, for the whole timeout."""
    strategy = replicas.mirrored(4)
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


# The two sleeps run one after the other: the first replica's collective waits 2
# seconds for the second's, 4 after the step began. Then nothing runs for 4, and
# nothing either after a step that has failed while a collective waited.
_SLOW_PROGRAM = """
import time
import keras
import tensorflow as tf
import tf_xshard
from tf_xshard.cli import logical_devices

strategy = tf.distribute.MirroredStrategy(logical_devices.use_logical_cpus(2))
with strategy.scope():
    weight = keras.Variable(0.0)
    optimizer = tf_xshard.CrossShardOptimizer(
        keras.optimizers.SGD(1.0),
        communication=tf_xshard.Communication(timeout_seconds=3.5))
    optimizer.build([weight])

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

step(tf.constant(0.0))
start = time.monotonic()
step(tf.constant(2.0))
assert time.monotonic() - start > 3.9
time.sleep(4.0)
try:
    step(tf.constant(-0.1))
except tf.errors.OpError as error:
    assert "of one replica" in str(error), error
time.sleep(4.0)
# A computation without collectives, such as an evaluation.
tf.function(lambda: tf.py_function(slow, [4.5], tf.float32))()
step(tf.constant(0.0))
try:
    step(tf.constant(-0.1))
except tf.errors.OpError as error:
    assert "of one replica" in str(error), error

# At once the next step, in which nothing waits at first.
@tf.function(autograph=False)
def late_step():
    first = tf.py_function(slow, [4.5], tf.float32)
    with tf.control_dependencies([first]):
        zero = tf.constant(0.0)
    step(zero)

late_step()
step(tf.constant(0.0))
print([float(v) for v in strategy.experimental_local_results(weight.value)])
"""


def test_waiting_for_nothing_is_no_timeout():
    """Neither between steps, nor for inputs, nor after a step that failed."""
    run = _run(_SLOW_PROGRAM)
    assert run.stdout.strip() == "[-5.0, -5.0]", run.stderr[-3000:]


def test_a_failed_call_does_not_count_for_the_next_one(monkeypatch):
    """Even if the watchdog looks before the call has reset the count."""
    waiting = object.__new__(watchdog._Waiting)
    waiting.lane = types.SimpleNamespace(timeout_seconds=3)
    waiting._graph, waiting._count = object(), None
    waiting._last, waiting._since = 0, 0.0
    waiting._read = lambda: 5
    for now, runs, is_overdue in (
        (1.0, True, False),
        (3.0, False, False),
        (9.0, False, False),
        (10.0, True, False),
        (12.0, True, False),
        (12.5, True, True),
    ):
        monkeypatch.setattr(
            watchdog.runtime, "a_function_uses", lambda handle, runs=runs: runs
        )
        assert waiting.is_overdue(now) == is_overdue, now
