"""TF1's wrappers eagerly, in a tf.function, and in several graphs."""

import gc
import weakref

import keras
import pytest
import tensorflow as tf

from tests.compat.v1 import graphs
from tests.support import v1_oracle
from tf_xshard.compat import v1

tf1 = tf.compat.v1
INNER = {
    "v1": lambda: tf1.train.MomentumOptimizer(1.0, 0.5),
    "keras": lambda: keras.optimizers.SGD(1.0, momentum=0.5),
}


def _shards(inner, w, step):
    optimizer = v1.CrossShardOptimizer(inner)

    def computation(x):
        loss = lambda: tf.reduce_mean(x) * w
        return [optimizer.minimize(loss, step, [w]), x]

    return lambda x: tf.reduce_mean(v1.shard(computation, [x], 2)[0])


def _towers(inner, w, step):
    optimizer = v1.TowerOptimizer(inner)

    def model_fn(features, mode):
        x = tf.reduce_mean(features)
        train = optimizer.minimize(lambda: x * w, step, [w])
        return v1.EstimatorSpec(mode, loss=x, train_op=train or True)

    mean, devices = tf1.losses.Reduction.MEAN, ["/CPU:0"] * 2
    replicated = v1.replicate_model_fn(model_fn, mean, devices=devices)
    return lambda x: replicated(x, None, "train").loss


@pytest.mark.parametrize(
    "build, inner, is_function",
    [
        (_shards, "v1", True),
        (_shards, "keras", True),
        (_towers, "v1", True),
        (_towers, "v1", False),
        (_towers, "keras", False),
    ],
)
def test_two_steps(build, inner, is_function):
    w, step = tf.Variable(10.0), tf.Variable(0)
    update = build(INNER[inner](), w, step)
    if is_function:
        update = tf.function(update, autograph=False)
    for _ in range(2):
        assert float(update(tf.constant([1.0, 3.0]))) == 2.0
    # Mean gradient 2: 10 - 2 - (1 + 2).
    assert [float(w), int(step)] == [5.0, 2]


def test_a_keras_optimizer_without_shards():
    w = keras.Variable([1.0, 2.0])
    optimizer = v1.CrossShardOptimizer(keras.optimizers.SGD(0.5))
    assert optimizer.get_slot(w, "momentum") is None
    step = tf.Variable(0)
    assert optimizer.minimize(lambda: tf.reduce_sum(w * w), step, [w]) is None
    assert [*w.numpy(), int(step)] == [0.0, 0.0, 1]
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply_gradients([(None, w)])
    with tf.Graph().as_default():
        with pytest.raises(TypeError, match="no operation that a Session"):
            v1.CrossShardOptimizer(keras.optimizers.SGD(0.5))
        with pytest.raises(TypeError, match="no operation that a Session"):
            optimizer.apply_gradients([(1.0, tf.Variable(1.0))])


def _step(optimizer, num_shards):
    def computation():
        w = tf1.get_variable("w", initializer=[1.0, 2.0])
        return optimizer.minimize(tf.reduce_sum(w * w))

    return v1.shard(computation, num_shards=num_shards)


def test_only_the_last_graph_of_an_optimizer_is_kept():
    optimizer = v1.CrossShardOptimizer(tf1.train.AdamOptimizer(0.1))
    references = []
    for _ in range(2):
        with tf.Graph().as_default() as graph:
            _step(optimizer, num_shards=2)
        references.append(weakref.ref(graph))
    gc.collect()
    assert references[0]() is None


@pytest.mark.parametrize("num_shards", [1, 2])
def test_one_optimizer_in_two_graphs_by_turns(num_shards):
    """Each graph has its own slots, made once, in whatever order it is used."""
    optimizer = v1.CrossShardOptimizer(tf1.train.AdamOptimizer(0.1))
    sessions = [tf1.Session(graph=tf.Graph()) for _ in range(2)]
    steps = [[], []]
    for reuse in (None, True):
        for session, of_graph in zip(sessions, steps, strict=True):
            with session.graph.as_default():
                with tf1.variable_scope("", reuse=reuse):
                    of_graph += _step(optimizer, num_shards)
                names = [v.op.name for v in optimizer.variables()]
            assert names == ["beta1_power", "beta2_power", "w/Adam", "w/Adam_1"]
    for count, session in enumerate(sessions, 1):
        # From outside of the graphs, too.
        [w] = session.graph.get_collection("trainable_variables")
        fetches = graphs.with_slots(optimizer, w)
        assert fetches[1].graph is session.graph
        oracle = v1_oracle.Adam([1.0, 2.0])
        with session.graph.as_default():
            session.run(tf1.global_variables_initializer())
        for step in steps[count - 1] * count:
            session.run(step)
            oracle.apply(2 * oracle.x)
        graphs.check_close(session.run(fetches), oracle.values())
        session.close()
