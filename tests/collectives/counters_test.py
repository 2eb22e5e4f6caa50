"""What is counted of the collectives that run."""

import numpy as np
import tensorflow as tf

import tf_xshard
from tf_xshard.collectives import watchdog

tf1 = tf.compat.v1


def test_a_graph_of_tf1_is_not_counted_when_it_is_built():
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
