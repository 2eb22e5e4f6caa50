"""`cross_replica_sum`: values and gradients in shards, and what it refuses."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
import tf_xshard.compat.v1.tensorflow as script_tf
from tests.compat.v1 import graphs
from tests.support import replicas
from tf_xshard.compat import v1

tf1 = tf.compat.v1
A, B, W = [1.0, 2.0], [3.0, 5.0], 10.0
GROUPS = [[0, 3], [2, 1]]
pytestmark = pytest.mark.usefixtures("graph")


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "shared"])
def test_value_and_gradient(outside):
    """With y = w a_0 + w a_1, d(b_0 y^2 + b_1 y^2) / 2 = (b_0 + b_1) y dy."""
    if outside:
        tf1.get_variable("w", initializer=W)

    def computation(a, b):
        with tf1.variable_scope("", reuse=tf1.AUTO_REUSE):
            w = tf1.get_variable("w", initializer=W)
        y = script_tf.tpu.cross_replica_sum(w * a[0], name="y")
        reduction = tf1.losses.Reduction.SUM
        optimizer = v1.CrossShardOptimizer(graphs.descent(), reduction)
        return optimizer.minimize(b[0] * y**2 / 2)

    inputs = [tf.constant(A), tf.constant(B)]
    train = v1.shard(computation, inputs, num_shards=2)
    [w] = tf1.global_variables()
    copies = tf1.get_collection(v1.SHARD_VARIABLES)
    assert len(copies) == (0 if outside else 1)
    values = graphs.run_steps(train, [w, *copies])
    assert set(values) == {W - (3 + 5) * 30 * (1 + 2)}


def test_groups():
    def computation(a, b):
        w = tf1.get_variable("w", initializer=W)
        y = v1.cross_replica_sum(w * a[0], GROUPS)
        # Chained, and of another type.
        twice = v1.cross_replica_sum(v1.cross_replica_sum(a, GROUPS))
        count = v1.cross_replica_sum(tf.constant([1, 2]))
        [gradient] = tf.gradients(b[0] * y**2 / 2, [w])
        return [y, gradient, twice, count[None]]

    a, b = np.float32([1, 2, 3, 4]), np.float32([5, 6, 7, 8])
    outputs = v1.shard(computation, [tf.constant(a), tf.constant(b)], 4)
    # In evaluation, outside of shards, there is nothing to sum.
    outputs.append(v1.cross_replica_sum(tf.constant(3.0)))
    with graphs.session() as session:
        y, gradient, twice, count, alone = session.run(outputs)
    assert alone == 3.0
    group = np.float32([[1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1]])
    np.testing.assert_array_equal(y, W * (group @ a))
    # Each replica's loss, of its own w: the original's gradient on a TPU.
    np.testing.assert_array_equal(gradient, a * (group @ (b * y)))
    np.testing.assert_array_equal(twice, [2 * a.sum()] * 4)
    np.testing.assert_array_equal(count, [[4, 8]] * 4)


def test_under_a_strategy():
    def on_replica(x):
        alone = v1.cross_replica_sum(x[0], [[1], [0]])
        return v1.cross_replica_sum(x[0]), alone

    with tf.__internal__.eager_context.eager_mode():
        found = replicas.run("mirrored", on_replica, num_replicas=2)
    assert found == ([11, 11], [1, 10])


@pytest.mark.parametrize("groups", [None, GROUPS], ids=str)
def test_the_original_s_graph_on_a_tpu(groups):
    both = (tf1.tpu.cross_replica_sum, v1.cross_replica_sum)
    computation = lambda x: [one(x, groups) for one in both]
    tf1.tpu.shard(computation, [tf.zeros([8])], num_shards=4)
    found = graphs.sums_on_tpu(tf1.get_default_graph())
    assert found == [groups or [[0, 1, 2, 3]]] * 2


summed = v1.cross_replica_sum
_USE_OURS = "Use tf_xshard.compat.v1.cross_replica_sum"


def _in_a_branch():
    return tf.cond(tf.constant(True), lambda: summed(1.0), lambda: 1.0)


def _in_a_tape():
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = summed(x)
    return tape.gradient(y, x)


def _size():
    return 1 if graphs.is_first("shard_") else 2


def _unequal():
    return [summed(1.0) for _ in range(_size())]


@pytest.mark.parametrize(
    "computation, error, text",
    [
        (_in_a_branch, RuntimeError, "to the top level of the computation"),
        (_in_a_tape, LookupError, "Use tf.gradients"),
        (_unequal, ValueError, r"\[1, 2\] times. Make the same calls"),
        (lambda: summed(tf.ones([_size()])), ValueError, "different shapes"),
        (lambda: summed(1.0, GROUPS), ValueError, "is for 4 replicas, but sh"),
        (lambda: summed(1.0, [[0, 0]]), ValueError, "puts replica 0"),
        (lambda: tf1.tpu.cross_replica_sum(A), ValueError, _USE_OURS),
        (lambda: tf_xshard.group_reduce(A), RuntimeError, _USE_OURS),
    ],
)
def test_refusals(computation, error, text):
    with pytest.raises(error, match=text):
        v1.shard(computation, num_shards=2)


def test_a_keras_wrapper_in_shards_is_refused():
    with tf.__internal__.eager_context.eager_mode():
        w = keras.Variable(1.0)
        optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build([w])

        @tf.function(autograph=False)
        def step(num):
            v1.shard(
                lambda: optimizer.apply([tf.ones([])], [w]), num_shards=num
            )

        with pytest.raises(RuntimeError, match="strategy's replicas, not over"):
            step(2)
        assert float(w) == 1.0
        step(1)  # One shard has nothing to reduce.
        assert float(w) == 0.0
