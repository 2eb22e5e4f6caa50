"""What watchdog_test.py runs, each function in a process of its own.

A collective that fails aborts all of its process.
"""

import gc
import os
import signal
import threading
import time

import keras
import tensorflow as tf
from tensorflow.python.eager import context

import tf_xshard
from tests.support import processes
from tests.support import replicas
from tf_xshard.cli import logical_devices
from tf_xshard.collectives import subgroups
from tf_xshard.collectives import transport
from tf_xshard.collectives import watchdog
from tf_xshard.distribute import site
from tf_xshard.private.tensorflow import runtime


class _Training:
    """A weight on two replicas that loses its gradients' sum."""

    def __init__(self, timeout_seconds):
        self.strategy = tf.distribute.MirroredStrategy(
            logical_devices.use_logical_cpus(2)
        )
        with self.strategy.scope():
            self.weight = keras.Variable(0.0)
            self.optimizer = tf_xshard.CrossShardOptimizer(
                keras.optimizers.SGD(1.0),
                "sum",
                loss_normalization="replica",
                communication=tf_xshard.Communication(
                    timeout_seconds=timeout_seconds
                ),
            )
            self.optimizer.build([self.weight])

    def step(self, gradient_of):
        """A step whose gradient is made on each replica."""

        @tf.function(autograph=False)
        def step(*arguments):
            def on_replica(*arguments):
                gradient = tf.ensure_shape(gradient_of(*arguments), [])
                self.optimizer.apply([gradient], [self.weight])

            self.strategy.run(on_replica, arguments)

        return step

    def values(self):
        return [
            float(one) for one in replicas.values(self.strategy, self.weight)
        ]


def _summed(timeout_seconds, tensor):
    channel = transport.Channel(
        tf_xshard.GroupAssignment([[0, 1]]),
        tf_xshard.Communication(timeout_seconds=timeout_seconds),
    )
    return subgroups.Subgroups(site.current(), channel).sum([tensor])


def stopped():
    """It is stopped in a collective, for longer than the timeout."""
    strategy = _Training(4.0).strategy
    go_on = f"sleep 6; kill -CONT {os.getpid()}"

    def slow():
        # Until the watchdog has seen that the other replica waits.
        time.sleep(1.5)
        with processes.started(["sh", "-c", go_on], tensorflow=0):
            os.kill(os.getpid(), signal.SIGSTOP)
            # And until it has looked again.
            time.sleep(1.0)
        return 1.0

    @tf.function(autograph=False)
    def step():
        def on_replica():
            one = tf.constant(1.0)
            if replicas.replica_id():
                one = tf.ensure_shape(tf.py_function(slow, [], tf.float32), [])
            [total] = _summed(4, one)
            return total

        return strategy.run(on_replica)

    start = time.monotonic()
    totals = strategy.experimental_local_results(step())
    return [float(one) for one in totals], time.monotonic() - start


def threads():
    """Models of the same shapes, in threads, and a context that is reset."""

    def trained(seconds):
        training = _Training(seconds)
        return training, training.step(
            lambda g: g * 10.0 ** replicas.replica_id()
        )

    every, errors = [trained(20.0) for _ in range(3)], []

    def train(index):
        try:
            for _ in range(50):
                every[index][1](tf.constant(float(index + 1)))
        except Exception as error:
            errors.append(str(error))

    running = [threading.Thread(target=train, args=(i,)) for i in range(3)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    values = [training.values() for training, _ in every]
    context._reset_context()
    training, step = trained(1.0)
    step(tf.constant(2.0))
    # After the reset, time goes on.
    time.sleep(1.5)
    step(tf.constant(2.0))
    return errors, values, training.values()


def missing():
    """Only a replica that takes no part is an error."""
    training, calls = _Training(3.5), []

    def slow(seconds):
        calls.append(seconds)
        if seconds < 0 and len(calls) % 2 == 0:
            time.sleep(1.0)
            raise ValueError("of one replica")
        time.sleep(abs(float(seconds)))
        return 1.0

    step = training.step(
        lambda seconds: tf.py_function(slow, [seconds], tf.float32) / 2
    )

    def fail():
        try:
            step(tf.constant(-0.1))
        except tf.errors.OpError as error:
            assert "of one replica" in str(error), error

    step(tf.constant(0.0))
    start = time.monotonic()
    # The two sleeps run one after the other: the first replica's collective
    # waits 2 seconds for the second's, 4 after the step began. Then nothing
    # runs for 4, and nothing either after a step that has failed while a
    # collective waited.
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
    values = training.values()

    # Replica 1 never takes part.
    @tf.function(autograph=False)
    def sum_of(both):
        def on_replica():
            if replicas.replica_id() == 0 or both:
                _summed(2, tf.constant(1.0))

        training.strategy.run(on_replica)

    sum_of(True)
    return values, *_error(lambda: sum_of(False))


def _error(call):
    """The error of a timeout, and the seconds until it came."""
    start = time.monotonic()
    try:
        call()
    except tf.errors.DeadlineExceededError as error:
        return str(error), time.monotonic() - start


def stuck():
    """What TensorFlow itself waits for has no timeout; a batch has."""
    strategy = _Training(300.0).strategy

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


class _Garbage:
    def __init__(self):
        self.itself, self.local = self, threading.local()
        self.local.value = 1

    def __del__(self):
        _Garbage()  # There is always more.


def garbage():
    """Looking at threads collects no garbage.

    Before Python 3.11.9, all threads of the process would wait forever.
    """

    def wait():
        threading.Event().wait()  # In a frame that nothing has looked at.

    for _ in range(4):
        threading.Thread(target=wait, daemon=True).start()
    thresholds = gc.get_threshold()
    _Garbage()
    gc.set_threshold(1)
    assert not runtime.a_function_runs()
    gc.set_threshold(*thresholds)
    was_enabled = gc.isenabled()
    gc.disable()
    assert not runtime.a_function_runs()
    return was_enabled, gc.isenabled()


ALL = ("stopped", "threads", "missing", "stuck", "garbage")
