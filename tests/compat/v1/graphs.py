"""Sessions, feeds and comparisons that the tests of TF1's names share."""

import contextlib

import numpy as np
import tensorflow as tf

from tests.support import v1_oracle

tf1 = tf.compat.v1


def descent(rate=1.0):
    return tf1.train.GradientDescentOptimizer(rate)


@contextlib.contextmanager
def session(num_cpus=1):
    """A session in which all variables have their initial values."""
    config = tf1.ConfigProto(device_count={"CPU": num_cpus})
    with tf1.Session(config=config) as made:
        made.run(tf1.global_variables_initializer())
        made.run(tf1.local_variables_initializer())
        yield made


@contextlib.contextmanager
def control_flow(v2):
    """Branches and loops of TensorFlow 2, or those of TensorFlow 1."""
    switches = (tf1.disable_control_flow_v2, tf1.enable_control_flow_v2)
    before = tf1.control_flow_v2_enabled()
    switches[v2]()
    try:
        yield
    finally:
        switches[before]()


def is_first(other):
    """True outside the name scopes of other shards or towers."""
    return other not in tf1.get_default_graph().get_name_scope()


def variables():
    """Ones: the first has dense gradients, and the second IndexedSlices."""
    w = tf1.get_variable("w", initializer=np.ones((3, 2), np.float32))
    e = tf1.get_variable("e", [4, 2], initializer=tf.ones_initializer())
    return w, e


def loss(dense, indices, values, w, e):
    """Its gradients are these numbers, whatever the variables hold."""
    of_e = tf.reduce_sum(values * tf.gather(e, indices))
    return tf.reduce_sum(dense * w) + of_e


def with_slots(optimizer, variable):
    """The variable and its slots, in the order of an oracle's values."""
    names = optimizer.get_slot_names()
    return [variable, *[optimizer.get_slot(variable, name) for name in names]]


def feeds(num_parts, num_steps):
    """The gradients of each step."""
    return [v1_oracle.gradients(num_parts, step) for step in range(num_steps)]


def placeholders(num_parts):
    [arrays] = feeds(num_parts, 1)
    return [tf1.placeholder(one.dtype, one.shape) for one in arrays]


def run_steps(step, fetches, inputs=(), feeds=((),), num_cpus=1):
    """Runs a step with each of `feeds`; returns what is fetched then."""
    with session(num_cpus) as made:
        for arrays in feeds:
            made.run(step, dict(zip(inputs, arrays, strict=True)))
        return made.run(fetches)


def sums_on_tpu(graph):
    """The groups of each CrossReplicaSum, which has no kernel on CPUs."""
    return [
        tf.get_static_value(one.inputs[1]).tolist()
        for one in graph.get_operations()
        if one.type == "CrossReplicaSum"
    ]


def check_close(got, expected, rtol=2e-5, atol=2e-6):
    """Compares all numbers of two nested structures."""
    both = tf.nest.flatten(got), tf.nest.flatten(expected)
    for one, other in zip(*both, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)
