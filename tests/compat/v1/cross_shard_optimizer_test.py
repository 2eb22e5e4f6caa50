"""v1's CrossShardOptimizer: NumPy oracles, the original's graph, contexts."""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.compat.v1 import graphs
from tests.support import replicas
from tests.support import v1_oracle
from tf_xshard.compat import v1

tf1 = tf.compat.v1
MEAN = tf1.losses.Reduction.MEAN
SUM = tf1.losses.Reduction.SUM
NUM_STEPS = 3
STRIDED = [[0, 2], [1, 3]]
UNSORTED = [[3, 0], [1, 2]]


def _expected(name, num_shards, groups, reduction):
    """Values and slots of each shard after the steps: (w, e) oracles."""
    oracle, _ = v1_oracle.OPTIMIZERS[name]
    shards = [
        (oracle(np.ones((3, 2))), oracle(np.ones((4, 2))))
        for _ in range(num_shards)
    ]
    for dense, indices, values in graphs.feeds(num_shards, NUM_STEPS):
        for members in groups or [range(num_shards)]:
            factor = 1 / len(members) if reduction == MEAN else 1
            w = sum(dense[m].astype(np.float64) for m in members)
            e = sum(v1_oracle.as_dense(indices[m], values[m]) for m in members)
            for m in members:
                shards[m][0].apply(factor * w)
                shards[m][1].apply(factor * e)
    return shards


@pytest.mark.parametrize(
    "name, num_shards, groups, reduction",
    [
        ("momentum", 4, UNSORTED, MEAN),
        ("adagrad", 2, [[1], [0]], SUM),
        ("adam", 2, None, MEAN),
        ("sgd", 1, [[0]], SUM),
    ],
    ids=["unsorted", "apart", "one_group", "one"],
)
@pytest.mark.usefixtures("graph")
def test_oracle_in_shard(name, num_shards, groups, reduction):
    oracle, make = v1_oracle.OPTIMIZERS[name]
    fetched = {}

    def computation(dense, indices, values):
        scope = tf1.get_default_graph().get_name_scope()
        w, e = graphs.variables()
        unused = tf1.get_variable("unused", initializer=1.0)
        step = tf1.train.get_or_create_global_step()
        optimizer = v1.CrossShardOptimizer(
            make(), reduction, group_assignment=groups
        )
        loss = graphs.loss(dense[0], indices[0], values[0], w, e)
        pairs = optimizer.compute_gradients(loss)
        assert isinstance(pairs[1][0], tf.IndexedSlices)
        assert pairs[2] == (None, unused)
        train = optimizer.apply_gradients(iter(pairs), step)
        slots = [graphs.with_slots(optimizer, v) for v in (w, e)]
        fetched[scope] = [step, *slots]
        assert optimizer.get_slot_names() == list(oracle.slots)
        assert not any(graphs.with_slots(optimizer, unused)[1:])
        return train

    inputs = graphs.placeholders(num_shards)
    train = v1.shard(computation, inputs, num_shards=num_shards)
    feeds = graphs.feeds(num_shards, NUM_STEPS)
    got = graphs.run_steps(train, fetched, inputs, feeds)
    of_shards = _expected(name, num_shards, groups, reduction)
    for index, (w, e) in enumerate(of_shards):
        found = got[f"shard_{index}" if index else ""]
        graphs.check_close(found, [NUM_STEPS, w.values(), e.values()])


def _strategy_step(strategy, optimizer, w, e, num, inputs):
    """One step of all replicas; `inputs` hold a row for each."""

    def on_replica():
        own = [one[replicas.replica_id_tensor()] for one in inputs]
        loss = lambda: graphs.loss(*own, w, e)
        return optimizer.minimize(loss, global_step=num, var_list=[w, e])

    return strategy.run(on_replica)


@pytest.mark.parametrize(
    "inner, kind, name, groups, reduction",
    [
        ("nested", "mirrored", "momentum", STRIDED, SUM),
        ("v1", "tpu_permuted", "adam", UNSORTED, MEAN),
        ("keras", "tpu", "momentum", STRIDED, MEAN),
        ("eager", "mirrored", "adam", [[1, 0]], MEAN),
    ],
    ids=["mirrored", "tpu", "keras", "eager"],
)
def test_oracle_under_a_strategy(inner, kind, name, groups, reduction):
    num_replicas = 2 if inner == "eager" else 4
    strategy = replicas.STRATEGIES[kind](num_replicas)
    oracle, make = v1_oracle.OPTIMIZERS[name]
    factor = 1
    if inner == "keras":
        make = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)
        factor = -0.1  # Its momentum accumulates steps.
    with strategy.scope():
        w = tf.Variable(np.ones((3, 2), np.float32))
        variable = keras.Variable if inner == "keras" else tf.Variable
        e = variable(np.ones((4, 2), np.float32))
        num = tf.Variable(0)
        optimizer = v1.CrossShardOptimizer(
            make(), reduction, group_assignment=groups
        )
        if inner == "nested":  # The outer one sums over one replica each.
            optimizer = v1.CrossShardOptimizer(
                optimizer, group_assignment=[[0], [1], [2], [3]]
            )

    def step(*inputs):
        _strategy_step(strategy, optimizer, w, e, num, inputs)

    if inner != "eager":
        step = tf.function(step, autograph=False)
    for arrays in graphs.feeds(num_replicas, NUM_STEPS):
        step(*map(tf.constant, arrays))
    assert set(oracle.slots) <= set(optimizer.get_slot_names())
    expected = _expected(name, num_replicas, groups, reduction)
    for index, variable in enumerate((w, e)):
        of_replicas = [pair[index] for pair in expected]
        got = replicas.values(strategy, variable)
        graphs.check_close(got, [one.x for one in of_replicas])
        for slot in oracle.slots:
            got = replicas.values(strategy, optimizer.get_slot(variable, slot))
            wanted = [factor * one.state[slot] for one in of_replicas]
            graphs.check_close(got, wanted)
    assert num.numpy() == NUM_STEPS


@pytest.mark.usefixtures("graph")
def test_oracle_under_a_strategy_in_a_tf1_graph():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        w, e = graphs.variables()
        num = tf1.train.get_or_create_global_step()
        adam = tf1.train.AdamOptimizer(0.1)
        optimizer = v1.CrossShardOptimizer(adam, group_assignment=[[1, 0]])
    inputs = graphs.placeholders(2)
    step = _strategy_step(strategy, optimizer, w, e, num, inputs)
    train = strategy.group(step)
    fetches = [*strategy.experimental_local_results(w), num]
    feeds = graphs.feeds(2, NUM_STEPS)
    got = graphs.run_steps(train, fetches, inputs, feeds, num_cpus=2)
    expected = _expected("adam", 2, None, MEAN)
    graphs.check_close(got, [*[w.x for w, _ in expected], NUM_STEPS], atol=0)


@pytest.mark.parametrize(
    "reduction, groups",
    [(MEAN, None), (SUM, UNSORTED)],
    ids=["one_group", "unsorted"],
)
def test_the_originals_graph_on_a_tpu(reduction, groups):
    original, ours = (
        _tpu_graph(one, reduction, groups)
        for one in (tf1.tpu.CrossShardOptimizer, v1.CrossShardOptimizer)
    )
    assert original == ours
    # Two of three variables have a gradient.
    assert ours[-1] == [groups or [[0, 1, 2, 3]]] * 2


def _tpu_graph(kind, reduction, groups):
    """Variables' names, counts of operations by type, groups of the sums."""

    def computation(x):
        w = tf1.get_variable("w", [4, 2])
        b = tf1.get_variable("b", [2])
        tf1.get_variable("unused", [])
        momentum = tf1.train.MomentumOptimizer(0.1, 0.9)
        loss = tf.reduce_mean(x) * tf.reduce_sum(tf.gather(w, [0, 1]))
        return kind(momentum, reduction, group_assignment=groups).minimize(
            loss + tf.reduce_sum(b), tf1.train.get_or_create_global_step()
        )

    with tf.Graph().as_default() as graph:
        tf1.tpu.shard(computation, [tf.zeros([8])], num_shards=4)
        names = [v.op.name for v in tf1.global_variables()]
    types = collections.Counter(op.type for op in graph.get_operations())
    return names, types, graphs.sums_on_tpu(graph)


@pytest.mark.parametrize("use_resource, v2", [(True, True), (False, False)])
@pytest.mark.usefixtures("graph")
def test_one_shard_runs_without_a_tpu_in_branches_too(use_resource, v2):
    """The original's CrossReplicaSum has no kernel there."""
    with graphs.control_flow(v2):
        w = tf1.get_variable("w", initializer=3.0, use_resource=use_resource)
        step = tf1.train.get_or_create_global_step()
        momentum = tf1.train.MomentumOptimizer(1.0, 0.5)
        optimizer = v1.CrossShardOptimizer(momentum)
        pairs = optimizer.compute_gradients(w * w)
        train = optimizer.apply_gradients(pairs, step)
        assert train.name == "CrossShardOptimizer"  # As documented.
        apply = lambda: optimizer.apply_gradients(pairs, step, name="mine")
        in_branch = tf.cond(tf.constant(True), apply, tf.no_op)
        with graphs.session() as session:
            session.run(train)
            session.run(in_branch)
            # 3 - 6 = -3; then momentum 0.5 * 6 - 6 = -3.
            assert session.run([w, step]) == [0.0, 2]


@pytest.mark.parametrize(
    "make", [tf1.train.AdamOptimizer, keras.optimizers.Adam]
)
@pytest.mark.parametrize("early", [False, True])
def test_checkpoint_keeps_all_state(make, early, tmp_path):
    """The original restores slots into orphans and loses beta powers."""

    def made():
        optimizer = v1.CrossShardOptimizer(make(0.1))
        return tf.train.Checkpoint(w=tf.Variable(1.0), optimizer=optimizer)

    def train(one, steps):
        for step in range(steps):
            one.optimizer.minimize(lambda: one.w * (step + 1.0), None, [one.w])

    first, other = made(), made()
    train(first, 2)
    path = first.save(str(tmp_path / "model"))
    train(first, 3)
    if not early:
        train(other, 1)
    status = other.restore(path)
    train(other, 3)
    status.assert_consumed()
    assert other.w.numpy() == first.w.numpy()


def _optimizer(opt=None, **kwargs):
    return v1.CrossShardOptimizer(opt or graphs.descent(), **kwargs)


@pytest.mark.usefixtures("graph")
def test_every_wrapper_is_an_optimizer_and_refuses_bad_pairs():
    getter = v1.AGNCustomGetter("/CPU:0")
    with tf1.variable_scope("", custom_getter=getter):
        w = tf1.get_variable("w", [2])
    towers = v1.TowerOptimizer(graphs.descent())
    agn = v1.AGNOptimizer(graphs.descent(), 1, getter)
    for optimizer in (_optimizer(), towers, agn):
        assert isinstance(optimizer, tf1.train.Optimizer)
        for pairs, error, text in (
            ([], ValueError, "No variables provided"),
            ([(None, w)], ValueError, "No gradients provided"),
            ([w], ValueError, r"must hold \(gradient, variable\) pairs"),
            (None, TypeError, "not iterable"),
            ([("text", w)], (TypeError, ValueError), "string|float32"),
        ):
            with pytest.raises(error, match=text):
                optimizer.apply_gradients(pairs)
        with pytest.raises(ValueError, match="Invalid type tf.int32"):
            optimizer.compute_gradients(tf.constant(1))


@pytest.mark.usefixtures("graph")
def test_refusals():
    w = tf1.get_variable("w", [2])
    pairs = [(tf.ones([2]), w)]
    shared = [[0, 1], [1, 0]]

    def apart():
        return _optimizer(group_assignment=[[0], [1]])

    def sharded(call):
        return lambda: v1.shard(call, num_shards=2)

    for call, text in (
        (lambda: _optimizer(reduction="mean"), "reduction must be one of"),
        (lambda: _optimizer("sgd"), "got str"),
        (lambda: _optimizer(name=""), "name"),
        (lambda: _optimizer(group_assignment=shared), "in groups 0 and"),
        (lambda: _optimizer(group_assignment="ab"), "not a list of replica"),
        (lambda: apart().compute_gradients(w[0]), "but code outside"),
        (lambda: apart().apply_gradients(pairs), "but code outside"),
        (sharded(lambda: apart().apply_gradients(pairs)), "Make them inside"),
        (lambda: _optimizer().minimize(None), "tensor or a function"),
        (sharded(lambda: _optimizer().minimize(None)), "tensor or a function"),
        (sharded(lambda: _optimizer().minimize([w])), "tensor or a function"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            call()


def test_bad_eager_calls():
    w = tf.Variable(1.0)
    with pytest.raises(RuntimeError, match="function"):
        _optimizer().compute_gradients(w * w)
    with replicas.mirrored(2).scope():
        with pytest.raises(RuntimeError, match="cross-replica context"):
            _optimizer().apply_gradients([(1.0, w)])


@pytest.mark.usefixtures("graph")
def test_between_the_stages():
    """Each shard clips its own gradients, which are divided already.

    A gradient that only some shards have counts as zero elsewhere.
    """

    def computation(x):
        w = tf1.get_variable("w", initializer=0.0)
        o = tf1.get_variable("o", initializer=0.0)
        x, optimizer = tf.reduce_sum(x), _optimizer()
        [(gradient, _), _] = optimizer.compute_gradients(x * w)
        of_first = x if graphs.is_first("shard_") else None
        clipped = tf.clip_by_value(gradient, -1.0, 1.0)
        return optimizer.apply_gradients([(clipped, w), (of_first, o)])

    train = v1.shard(computation, [tf.constant([1.0, 8.0])], num_shards=2)
    copies = tf1.get_collection(v1.SHARD_VARIABLES)
    got = graphs.run_steps(train, [tf1.global_variables(), copies])
    assert got == [[-(0.5 + 1.0), -1.0]] * 2
