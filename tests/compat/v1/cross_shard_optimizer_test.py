"""v1's CrossShardOptimizer: NumPy oracles, the original's graph, contexts."""

import collections
import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import replicas
from tests.support import v1_oracle
from tests.support import versions
from tf_xshard.compat import v1

tf1 = tf.compat.v1
MEAN = tf1.losses.Reduction.MEAN
SUM = tf1.losses.Reduction.SUM
NUM_STEPS = 4
GROUPS = {
    1: [None, [[0]]],
    2: [None, [[0], [1]], [[1, 0]]],
    4: [None, [[0, 2], [1, 3]], [[3, 0], [1, 2]], [[0], [1], [2], [3]]],
}


def _expected(name, num_shards, groups, reduction):
    """Values and slots of each shard after the steps: (w, e) oracles."""
    oracle, _ = v1_oracle.OPTIMIZERS[name]
    shards = [
        (oracle(np.ones((3, 2))), oracle(np.ones((4, 2))))
        for _ in range(num_shards)
    ]
    for step in range(NUM_STEPS):
        dense, indices, values = v1_oracle.gradients(num_shards, step)
        for members in groups or [range(num_shards)]:
            factor = 1 / len(members) if reduction == MEAN else 1
            w = sum(dense[m].astype(np.float64) for m in members)
            e = sum(v1_oracle.as_dense(indices[m], values[m]) for m in members)
            for m in members:
                shards[m][0].apply(factor * w)
                shards[m][1].apply(factor * e)
    return shards


def _loss(dense, indices, values, w, e):
    """Its gradients are these numbers, whatever the variables hold."""
    return tf.reduce_sum(dense * w) + tf.reduce_sum(
        values * tf.gather(e, indices)
    )


def _feeds(num_shards):
    return [v1_oracle.gradients(num_shards, s) for s in range(NUM_STEPS)]


def _placeholders(num_shards):
    return [
        tf1.placeholder(array.dtype, array.shape)
        for array in v1_oracle.gradients(num_shards, 0)
    ]


@pytest.mark.parametrize(
    "num_shards, groups, name, reduction",
    [
        *itertools.product(
            [4], [[[3, 0], [1, 2]]], v1_oracle.OPTIMIZERS, (MEAN, SUM)
        ),
        *(
            (*some, name, reduction)
            for some, name, reduction in replicas.in_turn(
                [(n, groups) for n, every in GROUPS.items() for groups in every]
                * 2,
                list(v1_oracle.OPTIMIZERS),
                (MEAN, SUM, SUM, MEAN),
            )
        ),
    ],
    ids=str,
)
def test_oracle_in_shard(num_shards, groups, name, reduction):
    oracle, make = v1_oracle.OPTIMIZERS[name]
    fetched = {}

    def computation(dense, indices, values):
        scope = tf1.get_default_graph().get_name_scope()
        index = int(scope.removeprefix("shard_") or 0)
        w = tf1.get_variable("w", initializer=np.ones((3, 2), np.float32))
        e = tf1.get_variable("e", initializer=np.ones((4, 2), np.float32))
        unused = tf1.get_variable("unused", initializer=1.0)
        optimizer = v1.CrossShardOptimizer(
            make(), reduction, group_assignment=groups
        )
        pairs = optimizer.compute_gradients(
            _loss(dense[0], indices[0], values[0], w, e)
        )
        assert isinstance(pairs[1][0], tf.IndexedSlices)
        assert pairs[2] == (None, unused)
        train = optimizer.apply_gradients(
            zip(*zip(*pairs, strict=True), strict=True),
            tf1.train.get_or_create_global_step(),
        )
        fetched[index] = [w, e]
        assert optimizer.get_slot_names() == list(oracle.slots)
        for slot in oracle.slots:
            fetched[index] += [optimizer.get_slot(v, slot) for v in (w, e)]
            assert optimizer.get_slot(unused, slot) is None
        return train

    with tf.Graph().as_default(), tf1.Session() as session:
        inputs = _placeholders(num_shards)
        train = v1.shard(computation, inputs, num_shards=num_shards)
        session.run(tf1.global_variables_initializer())
        for arrays in _feeds(num_shards):
            session.run(train, dict(zip(inputs, arrays, strict=True)))
        got = session.run(fetched)
        assert session.run(tf1.train.get_global_step()) == NUM_STEPS
    expected = _expected(name, num_shards, groups, reduction)
    for index, (w, e) in enumerate(expected):
        wanted = [w.x, e.x]
        for slot in oracle.slots:
            wanted += [w.state[slot], e.state[slot]]
        for one, other in zip(got[index], wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_the_oracle_tells_groups_apart():
    """Each wrong way gives other numbers."""
    right = _expected("momentum", 4, [[0, 2], [1, 3]], MEAN)
    for wrong in (
        _expected("momentum", 4, None, MEAN),
        _expected("momentum", 4, [[0, 1], [2, 3]], MEAN),
        _expected("momentum", 4, [[0, 2], [1, 3]], SUM),
        _expected("momentum", 4, [[0], [1], [2], [3]], MEAN),
    ):
        for mine, theirs in zip(right, wrong, strict=True):
            assert np.abs(mine[0].x - theirs[0].x).max() > 1e-2


def _strategy_step(strategy, optimizer, w, e, num, inputs):
    """One step of all replicas; `inputs` hold a row for each."""

    def on_replica():
        r = replicas.replica_id_tensor()
        dense, indices, values = (tf.gather(array, r) for array in inputs)
        return optimizer.minimize(
            lambda: _loss(dense, indices, values, w, e),
            var_list=[w, e],
            global_step=num,
        )

    return strategy.run(on_replica)


@pytest.mark.parametrize(
    "groups, name, reduction, kind",
    [
        *itertools.product(
            [[[3, 0], [1, 2]]], v1_oracle.OPTIMIZERS, (MEAN, SUM), ["mirrored"]
        ),
        *(
            (groups, name, reduction, kind)
            for name, groups, reduction, kind in replicas.in_turn(
                [*v1_oracle.OPTIMIZERS] * 2,
                GROUPS[4][:3],
                (SUM, MEAN),
                replicas.TPUS[::-1],
            )
        ),
        (GROUPS[4][0], "adam", MEAN, "mirrored"),
        (GROUPS[4][1], "momentum", SUM, "mirrored"),
    ],
    ids=str,
)
def test_oracle_under_a_strategy(groups, name, reduction, kind):
    oracle, make = v1_oracle.OPTIMIZERS[name]
    strategy = replicas.STRATEGIES[kind](4)
    with strategy.scope():
        w = tf.Variable(np.ones((3, 2), np.float32))
        e = tf.Variable(np.ones((4, 2), np.float32))
        num = tf.Variable(0)
        optimizer = v1.CrossShardOptimizer(
            make(), reduction, group_assignment=groups
        )

    @tf.function(autograph=False)
    def step(*inputs):
        _strategy_step(strategy, optimizer, w, e, num, inputs)

    for arrays in _feeds(4):
        step(*map(tf.constant, arrays))
    expected = _expected(name, 4, groups, reduction)
    for position, variable in enumerate((w, e)):
        for r, value in enumerate(replicas.values(strategy, variable)):
            np.testing.assert_allclose(
                value, expected[r][position].x, rtol=2e-5, atol=2e-6
            )
        for slot in oracle.slots:
            found = optimizer.get_slot(variable, slot)
            for r, value in enumerate(replicas.values(strategy, found)):
                np.testing.assert_allclose(
                    value,
                    expected[r][position].state[slot],
                    rtol=2e-5,
                    atol=2e-6,
                )
    assert num.numpy() == NUM_STEPS


@pytest.mark.parametrize("groups", GROUPS[2], ids=str)
def test_oracle_under_a_strategy_eagerly(groups):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        w = tf.Variable(np.ones((3, 2), np.float32))
        e = tf.Variable(np.ones((4, 2), np.float32))
        num = tf.Variable(0)
        optimizer = v1.CrossShardOptimizer(
            tf1.train.AdamOptimizer(0.1), group_assignment=groups
        )
    for arrays in _feeds(2):
        _strategy_step(strategy, optimizer, w, e, num, arrays)
    expected = _expected("adam", 2, groups, MEAN)
    for r, value in enumerate(replicas.values(strategy, w)):
        np.testing.assert_allclose(value, expected[r][0].x, rtol=2e-5)


@pytest.mark.parametrize("groups", GROUPS[2], ids=str)
def test_oracle_under_a_strategy_in_a_tf1_graph(groups):
    with tf.Graph().as_default():
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            w = tf1.get_variable("w", initializer=np.ones((3, 2), np.float32))
            e = tf1.get_variable("e", initializer=np.ones((4, 2), np.float32))
            num = tf1.train.get_or_create_global_step()
            optimizer = v1.CrossShardOptimizer(
                tf1.train.AdamOptimizer(0.1), group_assignment=groups
            )
        inputs = _placeholders(2)
        train = strategy.group(
            _strategy_step(strategy, optimizer, w, e, num, inputs)
        )
        config = tf1.ConfigProto(device_count={"CPU": 2})
        with tf1.Session(config=config) as session:
            session.run(tf1.global_variables_initializer())
            for arrays in _feeds(2):
                session.run(train, dict(zip(inputs, arrays, strict=True)))
            got = session.run(list(strategy.experimental_local_results(w)))
            assert session.run(num) == NUM_STEPS
    expected = _expected("adam", 2, groups, MEAN)
    for r, value in enumerate(got):
        np.testing.assert_allclose(value, expected[r][0].x, rtol=2e-5)


KERAS = {
    "momentum": (
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        {"momentum": ("momentum", -0.1)},
    ),
    "adam": (
        lambda: keras.optimizers.Adam(0.1, epsilon=1e-8),
        {"momentum": ("m", 1), "velocity": ("v", 1)},
    ),
}


@pytest.mark.parametrize("name", KERAS)
@pytest.mark.parametrize("kind", ["mirrored", "tpu"])
@pytest.mark.parametrize("groups", GROUPS[4][:2], ids=str)
def test_a_keras_optimizer_inside(groups, kind, name):
    make, slots = KERAS[name]
    strategy = replicas.STRATEGIES[kind](4)
    with strategy.scope():
        w = tf.Variable(np.ones((3, 2), np.float32))
        e = keras.Variable(np.ones((4, 2), np.float32))
        num = tf.Variable(0)
        optimizer = v1.CrossShardOptimizer(make(), group_assignment=groups)

    @tf.function(autograph=False)
    def step(*inputs):
        _strategy_step(strategy, optimizer, w, e, num, inputs)

    for arrays in _feeds(4):
        step(*map(tf.constant, arrays))
    assert set(slots) <= set(optimizer.get_slot_names())
    expected = _expected(name, 4, groups, MEAN)
    for position, variable in enumerate((w, e)):
        for r, value in enumerate(replicas.values(strategy, variable)):
            np.testing.assert_allclose(
                value, expected[r][position].x, rtol=3e-5, atol=3e-6
            )
        for slot, (theirs, factor) in slots.items():
            found = optimizer.get_slot(variable, slot)
            for r, value in enumerate(replicas.values(strategy, found)):
                np.testing.assert_allclose(
                    value,
                    factor * expected[r][position].state[theirs],
                    rtol=3e-5,
                    atol=3e-6,
                )
    assert num.numpy() == NUM_STEPS


def test_a_keras_optimizer_eagerly_and_with_no_strategy():
    w = keras.Variable([1.0, 2.0])
    optimizer = v1.CrossShardOptimizer(keras.optimizers.SGD(0.5))
    assert optimizer.get_slot(w, "momentum") is None
    step = tf.Variable(0)
    assert optimizer.minimize(lambda: tf.reduce_sum(w * w), step, [w]) is None
    np.testing.assert_array_equal(w, [0.0, 0.0])
    assert step.numpy() == 1
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply_gradients([(None, w)])


def test_a_keras_optimizer_in_a_tf1_graph_is_refused():
    optimizer = v1.CrossShardOptimizer(keras.optimizers.SGD(0.5))
    with tf.Graph().as_default():
        with pytest.raises(TypeError, match="no operation that a Session"):
            v1.CrossShardOptimizer(keras.optimizers.SGD(0.5))
        with pytest.raises(TypeError, match="no operation that a Session"):
            optimizer.apply_gradients([(1.0, tf.Variable(1.0))])


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("reduction", [MEAN, SUM])
@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_the_originals_graph_on_a_tpu(num_shards, reduction, sparse):
    half = max(1, num_shards // 2)
    strided = [list(range(i, num_shards, half)) for i in range(half)]
    for groups in (None, strided):
        original, ours = (
            _tpu_graph(one, num_shards, reduction, groups, sparse)
            for one in (tf1.tpu.CrossShardOptimizer, v1.CrossShardOptimizer)
        )
        assert original == ours
        # Two of three variables have a gradient.
        every = [list(range(num_shards))] if groups is None else groups
        assert ours[1] == [every] * 2


def _tpu_graph(kind, num_shards, reduction, groups, sparse):
    """Types and counts of operations, group constants, scale factors."""

    def computation(x):
        w = tf1.get_variable("w", [4, 2])
        b = tf1.get_variable("b", [2])
        tf1.get_variable("unused", [])
        rows = tf.gather(w, [0, 1]) if sparse else w
        optimizer = kind(
            tf1.train.MomentumOptimizer(0.1, 0.9),
            reduction,
            group_assignment=groups,
        )
        return optimizer.minimize(
            tf.reduce_mean(x) * tf.reduce_sum(rows) + tf.reduce_sum(b),
            global_step=tf1.train.get_or_create_global_step(),
        )

    with tf.Graph().as_default() as graph:
        tf1.tpu.shard(computation, [tf.zeros([8])], num_shards=num_shards)
    operations = graph.get_operations()
    types = collections.Counter(op.type for op in operations)
    groups = [
        tf.get_static_value(op.inputs[1]).tolist()
        for op in operations
        if op.type == "CrossReplicaSum"
    ]
    factors = sorted(
        float(value)
        for op in operations
        if op.type == "Mul"
        for value in map(tf.get_static_value, op.inputs)
        if value is not None and not value.shape
    )
    return types, groups, factors


def test_rewrite_and_replicate_build_on_a_tpu():
    def computation():
        w = tf1.get_variable("w", [2])
        return v1.CrossShardOptimizer(
            tf1.train.GradientDescentOptimizer(0.1)
        ).minimize(tf.reduce_sum(w))

    for build in (
        lambda: tf1.tpu.rewrite(computation),
        lambda: tf1.tpu.replicate(computation, [[], []]),
    ):
        with tf.Graph().as_default() as graph:
            build()
        types = [op.type for op in graph.get_operations()]
        assert types.count("CrossReplicaSum") == 1


def test_one_shard_runs_without_a_tpu():
    """The original's CrossReplicaSum has no kernel there."""
    with tf.Graph().as_default(), tf1.Session() as session:
        w = tf1.get_variable("w", initializer=3.0)
        optimizer = v1.CrossShardOptimizer(
            tf1.train.GradientDescentOptimizer(1.0)
        )
        step = tf1.train.get_or_create_global_step()
        train = optimizer.minimize(w * w, global_step=step)
        assert train.name == "CrossShardOptimizer"  # As documented.
        assert optimizer.apply_gradients([(1.0, w)], name="mine").name == "mine"
        session.run(tf1.global_variables_initializer())
        session.run(train)
        assert session.run([w, step]) == [-3.0, 1]


@pytest.mark.parametrize("use_resource", [False, True])
@pytest.mark.parametrize("v2", [False, True])
def test_variables_and_control_flow(use_resource, v2):
    """Ref and resource variables; applied in a branch, v1 and v2."""
    was_v2 = tf1.control_flow_v2_enabled()
    (tf1.enable_control_flow_v2 if v2 else tf1.disable_control_flow_v2)()
    try:
        with tf.Graph().as_default(), tf1.Session() as session:
            w = tf1.get_variable(
                "w", initializer=3.0, use_resource=use_resource
            )
            optimizer = v1.CrossShardOptimizer(
                tf1.train.MomentumOptimizer(1.0, 0.5)
            )
            if v2 and not use_resource:  # TensorFlow can't: no ref in a branch.
                train = optimizer.minimize(w * w)
            else:
                pairs = optimizer.compute_gradients(w * w)

                def apply():
                    with tf.control_dependencies(
                        [optimizer.apply_gradients(pairs)]
                    ):
                        return tf.constant(True)

                train = tf.cond(
                    tf.constant(True), apply, lambda: tf.constant(False)
                )
            session.run(tf1.global_variables_initializer())
            session.run(train)
            session.run(train)
            # 3 - 6 = -3; then momentum 0.5 * 6 - 6 = -3.
            assert session.run(w) == 0.0
    finally:
        (
            tf1.enable_control_flow_v2
            if was_v2
            else tf1.disable_control_flow_v2
        )()


@versions.writes_graphs
def test_monitored_session(tmp_path):
    def computation(x):
        w = tf1.get_variable("w", initializer=0.0)
        return v1.CrossShardOptimizer(tf1.train.AdamOptimizer(0.1)).minimize(
            tf.reduce_mean(x) * w,
            global_step=tf1.train.get_or_create_global_step(),
        )

    for last in (3, 5):  # The second continues from the first's checkpoint.
        with tf.Graph().as_default():
            train = v1.shard(
                computation, [tf.constant([1.0, 2.0])], num_shards=2
            )
            with tf1.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path),
                hooks=[tf1.train.StopAtStepHook(last_step=last)],
            ) as session:
                while not session.should_stop():
                    session.run(train)
    reader = tf.train.load_checkpoint(str(tmp_path))
    assert reader.get_tensor("global_step") == 5
    oracle = v1_oracle.Adam(0.0)
    for _ in range(5):
        oracle.apply(1.5)
    np.testing.assert_allclose(reader.get_tensor("w"), oracle.x, rtol=1e-5)
    np.testing.assert_allclose(
        reader.get_tensor("beta1_power"), 0.9**6, rtol=1e-5
    )


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(tf1.train.AdamOptimizer, 0.1),
        functools.partial(tf1.train.MomentumOptimizer, 0.1, 0.9),
        functools.partial(keras.optimizers.Adam, 0.1),
    ],
    ids=["adam", "momentum", "keras"],
)
@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_checkpoint_keeps_all_state(make, early, tmp_path):
    """The original restores slots into orphans and loses beta powers."""

    def train(w, optimizer, steps):
        for step in range(steps):
            optimizer.minimize(lambda: w * (step + 1.0), var_list=[w])

    w, optimizer = tf.Variable(1.0), v1.CrossShardOptimizer(make())
    train(w, optimizer, 2)
    path = tf.train.Checkpoint(w=w, optimizer=optimizer).save(
        str(tmp_path / "model")
    )
    train(w, optimizer, 3)
    other, restored = tf.Variable(5.0), v1.CrossShardOptimizer(make())
    if not early:
        train(other, restored, 1)
    status = tf.train.Checkpoint(w=other, optimizer=restored).restore(path)
    train(other, restored, 3)
    status.assert_consumed()
    assert other.numpy() == w.numpy()


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"reduction": "mean"}, ValueError, "reduction must be one of"),
        ({"reduction": None}, ValueError, "reduction must be one of"),
        (
            {"reduction": tf1.losses.Reduction.NONE},
            ValueError,
            "reduction must be one of",
        ),
        ({"opt": None}, TypeError, "got NoneType"),
        ({"opt": "sgd"}, TypeError, "got str"),
        ({"opt": "sgd", "reduction": "sum"}, ValueError, "reduction"),
        ({"name": ""}, ValueError, "name"),
        ({"name": None}, ValueError, "name"),
        ({"group_assignment": [[0, 0], [1, 1]]}, ValueError, "twice|once"),
        ({"group_assignment": [[0, 1], [1, 0]]}, ValueError, "replica"),
        ({"group_assignment": [[0], [1, 2]]}, ValueError, "group"),
        ({"group_assignment": [0, 1]}, ValueError, "group"),
        ({"group_assignment": []}, ValueError, "empty"),
        ({"group_assignment": ()}, ValueError, "empty"),
        ({"group_assignment": False}, ValueError, "group"),
        ({"group_assignment": "garbage"}, ValueError, "group"),
        ({"group_assignment": [[0.5, 1]]}, ValueError, "group"),
    ],
)
def test_bad_constructor_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        v1.CrossShardOptimizer(
            **{"opt": tf1.train.GradientDescentOptimizer(0.1), **arguments}
        )


def _optimizer(**kwargs):
    return v1.CrossShardOptimizer(
        tf1.train.GradientDescentOptimizer(1.0), **kwargs
    )


def test_bad_calls():
    with tf.Graph().as_default():
        w = tf1.get_variable("w", [2])
        loss = tf.reduce_sum(w)
        for pairs, error in (
            ([], ValueError),
            ([(None, w)], ValueError),
            ([w], ValueError),
            (None, TypeError),
            ([("text", w)], (TypeError, ValueError)),
        ):
            with pytest.raises(error):
                _optimizer().apply_gradients(pairs)
        for wrapper in (v1.CrossShardOptimizer, v1.TowerOptimizer):
            optimizer = wrapper(tf1.train.GradientDescentOptimizer(1.0))
            with pytest.raises(ValueError, match="Invalid type tf.int32"):
                optimizer.compute_gradients(tf.constant(1))
        groups = _optimizer(group_assignment=[[0], [1]])
        for call in (
            lambda: groups.compute_gradients(loss),
            lambda: groups.apply_gradients([(tf.ones([2]), w)]),
        ):
            with pytest.raises(
                ValueError, match="is for 2 replicas, but code outside"
            ):
                call()
        for bad in (None, [loss], tf.constant(1)):
            with pytest.raises((TypeError, ValueError)):
                v1.shard(
                    lambda bad=bad: _optimizer().minimize(bad), num_shards=2
                )
    w = tf.Variable(1.0)
    with pytest.raises(RuntimeError, match="function"):
        _optimizer().compute_gradients(w * w)
    with replicas.mirrored(2).scope():
        with pytest.raises(RuntimeError, match="cross-replica context"):
            _optimizer().apply_gradients([(1.0, w)])


def test_constants_and_names():
    optimizer = _optimizer(name="mine")
    assert isinstance(optimizer, tf1.train.Optimizer)
    assert optimizer.get_name() == "mine"
    assert (optimizer.GATE_NONE, optimizer.GATE_OP, optimizer.GATE_GRAPH) == (
        0,
        1,
        2,
    )
    assert _optimizer().get_name() == "CrossShardOptimizer"


def test_clipping_between_the_stages():
    """Each shard clips its own gradients, which are divided already."""

    def computation(x):
        w = tf1.get_variable("w", initializer=0.0)
        optimizer = _optimizer()
        pairs = optimizer.compute_gradients(tf.reduce_sum(x) * w)
        return optimizer.apply_gradients(
            [(tf.clip_by_value(g, -1.0, 1.0), v) for g, v in pairs]
        )

    with tf.Graph().as_default(), tf1.Session() as session:
        train = v1.shard(computation, [tf.constant([1.0, 8.0])], num_shards=2)
        session.run(tf1.global_variables_initializer())
        session.run(train)
        assert session.run(tf1.global_variables()) == [-(0.5 + 1.0)]


def test_a_gradient_that_only_some_shards_have():
    def computation(x):
        w = tf1.get_variable("w", initializer=0.0)
        first = "shard_" not in tf1.get_default_graph().get_name_scope()
        gradient = tf.reduce_sum(x) if first else None
        other = tf1.get_variable("o", initializer=0.0)
        return _optimizer().apply_gradients([(gradient, w), (x[0], other)])

    with tf.Graph().as_default(), tf1.Session() as session:
        train = v1.shard(computation, [tf.constant([3.0, 8.0])], num_shards=2)
        session.run(tf1.global_variables_initializer())
        session.run(train)
        copies = tf1.get_collection(v1.SHARD_VARIABLES)
        assert session.run(tf1.global_variables()) == [-3.0, -11.0]
        assert session.run(copies) == [-3.0, -11.0]


def test_groups_cannot_share_variables():
    with tf.Graph().as_default():
        w = tf1.get_variable("w", [])
        with pytest.raises(ValueError, match="Make them inside"):
            v1.shard(
                lambda: _optimizer(group_assignment=[[0], [1]]).apply_gradients(
                    [(tf.ones([]), w)]
                ),
                num_shards=2,
            )


def test_the_optimizer_may_be_made_outside_the_computation():
    """Non-slot variables, such as Adam's beta powers, are each shard's own."""
    with tf.Graph().as_default(), tf1.Session() as session:
        optimizer = v1.CrossShardOptimizer(tf1.train.AdamOptimizer(0.1))

        def computation(x):
            w = tf1.get_variable("w", initializer=0.0)
            return optimizer.minimize(tf.reduce_mean(x) * w)

        train = v1.shard(
            computation, [tf.constant([1.0, 3.0, 2.0, 2.0])], num_shards=4
        )
        session.run(tf1.global_variables_initializer())
        for _ in range(5):
            session.run(train)
        oracle = v1_oracle.Adam(0.0)
        for _ in range(5):
            oracle.apply(2.0)
        copies = [
            v
            for v in tf1.global_variables()
            + tf1.get_collection(v1.SHARD_VARIABLES)
            if v.op.name.split("/")[-1] == "w"
        ]
        assert len(copies) == 4
        np.testing.assert_allclose(session.run(copies), oracle.x, rtol=1e-5)
        assert len(optimizer.variables()) == 4  # Shard 0's, the Saver's.


def test_wrapped_optimizers_do_not_sum_again():
    """Those that a v1 optimizer wraps, too."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        w = tf.Variable(0.0)
        optimizer = v1.CrossShardOptimizer(
            v1.CrossShardOptimizer(
                tf1.train.GradientDescentOptimizer(1.0), SUM
            ),
            SUM,
            group_assignment=[[0], [1]],
        )
    run = tf.function(
        lambda: strategy.run(
            lambda: (
                optimizer.apply_gradients([(replicas.power_of_ten(), w)])
                is None
            )
        )
    )
    run()
    # The inner one sums over both, nothing sums after it.
    assert [float(v) for v in replicas.values(strategy, w)] == [-11.0, -11.0]
