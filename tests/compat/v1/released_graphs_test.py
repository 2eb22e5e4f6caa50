"""One optimizer or getter of TF1 in many graphs keeps at most the last."""

import gc
import weakref

import pytest
import tensorflow as tf

from tests.compat.v1 import graphs
from tests.support import v1_oracle
from tf_xshard.compat import v1

tf1 = tf.compat.v1
NUM_GRAPHS = 2


def _minimize(optimizer, unused=None):
    w = tf1.get_variable("w", initializer=[1.0, 2.0])
    return optimizer.minimize(tf.reduce_sum(w * w))


def _shards(optimizer):
    return v1.shard(lambda: _minimize(optimizer), num_shards=2)


def _towers(optimizer):
    def model_fn(features, mode):
        step = _minimize(optimizer)
        return v1.EstimatorSpec(mode, loss=tf.zeros([]), train_op=step)

    replicated = v1.replicate_model_fn(model_fn, devices=["/CPU:0"] * 2)
    return [replicated(tf.zeros([2]), None, "train").train_op]


STEPS = {
    "shards": (v1.CrossShardOptimizer, _shards),
    "one shard": (v1.CrossShardOptimizer, _minimize),
    "towers": (v1.TowerOptimizer, _towers),
}


def _train(build, optimizer):
    """Builds and runs a graph; returns a weak reference to it."""
    with tf.Graph().as_default() as graph:
        step = build(optimizer)
        with graphs.session() as session:
            session.run(step)
    return weakref.ref(graph)


def _alive(references):
    gc.collect()
    return sum(one() is not None for one in references)


@pytest.mark.parametrize("name", ["shards", "towers"])
def test_an_optimizer_keeps_only_its_last_graph(name):
    wrapper, build = STEPS[name]
    optimizer = wrapper(tf1.train.AdamOptimizer(0.1))
    references = [_train(build, optimizer) for _ in range(NUM_GRAPHS)]
    # TensorFlow's optimizers keep the learning rate's tensor.
    assert _alive(references[:-1]) == 0
    del optimizer
    assert _alive(references) == 0


def test_a_getter_keeps_no_graph():
    getter = v1.AGNCustomGetter("/CPU:0")

    def build(getter):
        with tf1.variable_scope("", custom_getter=getter):
            w = tf1.get_variable("w", initializer=[1.0, 2.0])
        agn = v1.AGNOptimizer(tf1.train.AdamOptimizer(0.1), 1, getter, 2)
        assert len(getter.all_copies()) == 1
        return agn.minimize(tf.reduce_sum(w * w))

    references = [_train(build, getter) for _ in range(NUM_GRAPHS)]
    assert _alive(references) == 0


@pytest.mark.parametrize("name", STEPS)
def test_one_optimizer_in_two_graphs_by_turns(name):
    """Each graph has its own slots, made once, in whatever order it is used."""
    wrapper, build = STEPS[name]
    optimizer = wrapper(tf1.train.AdamOptimizer(0.1))
    sessions, steps = [], []
    for _ in range(2):
        with tf.Graph().as_default() as graph:
            steps.append([build(optimizer)])
            sessions.append(tf1.Session(graph=graph))
    for session, of_graph in zip(sessions, steps, strict=True):
        with session.graph.as_default():
            with tf1.variable_scope("", reuse=True):
                of_graph.append(build(optimizer))
            names = [v.op.name for v in optimizer.variables()]
        assert names == ["beta1_power", "beta2_power", "w/Adam", "w/Adam_1"]
    for count, (session, of_graph) in enumerate(
        zip(sessions, steps, strict=True), 1
    ):
        # From outside of the graphs, too.
        [w] = session.graph.get_collection("trainable_variables")
        slot = optimizer.get_slot(w, "m")
        assert slot.graph is session.graph
        oracle = v1_oracle.Adam([1.0, 2.0])
        with session.graph.as_default():
            session.run(tf1.global_variables_initializer())
        for step in of_graph * count:
            session.run(step)
            oracle.apply(2 * oracle.x)
        graphs.check_close(
            session.run([w, slot]), [oracle.x, oracle.state["m"]]
        )
        session.close()
