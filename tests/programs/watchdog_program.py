"""What watchdog_test.py runs, each function in a process of its own.

A collective that fails aborts all of its process.
"""

import os
import signal
import time
from concurrent import futures

import keras
import tensorflow as tf
from tensorflow.python.eager import context

import tf_xshard
from tests.support import processes
from tests.support import replicas
from tests.support import traced
from tf_xshard.cli import logical_devices
from tf_xshard.collectives import subgroups
from tf_xshard.collectives import transport
from tf_xshard.collectives import watchdog
from tf_xshard.distribute import site


def _strategy():
    return tf.distribute.MirroredStrategy(logical_devices.use_logical_cpus(2))


def _summed(timeout_seconds, tensor):
    channel = transport.Channel(
        tf_xshard.GroupAssignment([[0, 1]]),
        tf_xshard.Communication(timeout_seconds=timeout_seconds),
    )
    return subgroups.Subgroups(site.current(), channel).sum([tensor])


def _summing(strategy, timeout_seconds, number_of):
    """A function: the sum, on each replica, of what each of them makes."""

    @tf.function(autograph=False)
    def step(*arguments):
        def on_replica(*arguments):
            number = tf.ensure_shape(number_of(*arguments), [])
            [total] = _summed(timeout_seconds, number)
            return total

        return strategy.run(on_replica, arguments)

    return lambda *arguments: [
        float(one)
        for one in strategy.experimental_local_results(step(*arguments))
    ]


def stopped():
    """It is stopped in a collective, for longer than the timeout."""
    go_on = f"sleep 8; kill -CONT {os.getpid()}"

    def slow():
        # Until the watchdog has seen that the other replica waits.
        time.sleep(2.5)
        with processes.started(["sh", "-c", go_on], tensorflow=0):
            os.kill(os.getpid(), signal.SIGSTOP)
            # And until it has looked again.
            time.sleep(1.5)
        return 1.0

    def number():
        if replicas.replica_id():
            return tf.py_function(slow, [], tf.float32)
        return tf.constant(1.0)

    start = time.monotonic()
    totals = _summing(_strategy(), 6.0, number)()
    return totals, time.monotonic() - start


def threads():
    """Optimizers of equal shapes, in threads, and a context that is reset."""

    def training(seconds, number):
        one = traced.Traced(
            lambda: tf_xshard.CrossShardOptimizer(
                keras.optimizers.SGD(1.0),
                "sum",
                loss_normalization="replica",
                communication=tf_xshard.Communication(timeout_seconds=seconds),
            ),
            [0.0],
            _strategy(),
        )

        def train(num_steps):
            for _ in range(num_steps):
                one.step([number, 10 * number])
            return one.values()[0].tolist()

        return train

    trained = [training(20.0, number) for number in (1.0, 2.0, 3.0)]
    with futures.ThreadPoolExecutor(3) as pool:
        values = list(pool.map(lambda train: train(50), trained))
    context._reset_context()
    train = training(1.0, 2.0)
    train(1)
    # After the reset, time goes on.
    time.sleep(1.5)
    return values, train(1)


def missing():
    """Only a replica that takes no part is an error."""
    strategy, calls = _strategy(), []

    def slow(seconds):
        calls.append(seconds)
        time.sleep(abs(float(seconds)))
        if seconds < 0 and len(calls) % 2 == 0:
            raise ValueError("of one replica")
        return 1.0

    step = _summing(
        strategy, 3.5, lambda x: tf.py_function(slow, [x], tf.float32)
    )
    step(tf.constant(0.0))
    start = time.monotonic()
    # The two sleeps run one after the other: the first replica's collective
    # waits 2 seconds for the second's, 4 after the step began. Then nothing
    # runs for 4, and nothing either after a step that has failed while a
    # collective waited.
    step(tf.constant(2.0))
    assert time.monotonic() - start > 3.9
    time.sleep(4.0)
    try:
        step(tf.constant(-1.0))
    except tf.errors.OpError as error:
        assert "of one replica" in str(error), error
    time.sleep(4.0)
    # A computation without collectives, such as an evaluation.
    tf.function(lambda: tf.py_function(slow, [4.5], tf.float32))()
    totals = step(tf.constant(0.0))

    # Replica 1 never takes part.
    @tf.function(autograph=False)
    def sum_of(both):
        def on_replica():
            if replicas.replica_id() == 0 or both:
                _summed(2, tf.constant(1.0))

        strategy.run(on_replica)

    sum_of(True)
    return totals, *_error(lambda: sum_of(False))


def _error(call):
    """The error of a timeout, and the seconds until it came."""
    start = time.monotonic()
    try:
        call()
    except tf.errors.DeadlineExceededError as error:
        return str(error), time.monotonic() - start


def stuck():
    """What TensorFlow itself waits for has no timeout; a batch has."""
    strategy = _strategy()

    def wait(seconds):
        time.sleep(float(seconds))
        return seconds

    @tf.function(autograph=False)
    def step(seconds):
        # Tracing does not count.
        time.sleep(3.0)
        data = tf.py_function(wait, [seconds], tf.float32)
        data = tf.ensure_shape(data, [])
        strategy.run(lambda: _summed(300, data))

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
    return _error(lambda: step(tf.constant(4.0)))


ALL = ("stopped", "threads", "missing", "stuck")
