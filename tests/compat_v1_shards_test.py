"""`shard` executes what `tf.compat.v1.tpu.shard` is documented to do."""

import numpy as np
import pytest
import tensorflow as tf

from tf_xshard.compat import v1

tf1 = tf.compat.v1


def _run(fetch, *, initialize=True, graph=None):
    with tf1.Session(graph=graph) as session:
        if initialize:
            session.run(tf1.global_variables_initializer())
        return session.run(fetch)


@pytest.fixture(autouse=True)
def _graph():
    with tf.Graph().as_default():
        yield


def test_inputs_are_split_and_outputs_joined():
    x = np.arange(24.0).reshape(4, 6)
    got = v1.shard(
        lambda a, b: [a * 2, tf.reduce_sum(b), a, tf.transpose(b)],
        [tf.constant(x), tf.constant(x)],
        num_shards=2,
        input_shard_axes=[0, 1],
        outputs_from_all_shards=[True, True, False, True],
        output_shard_axes=[0, 0, 0, 0],
    )
    doubled, sums, first, transposed = _run(got)
    np.testing.assert_array_equal(doubled, 2 * x)
    np.testing.assert_array_equal(sums, [x[:, :3].sum(), x[:, 3:].sum()])
    np.testing.assert_array_equal(first, x[:2])
    np.testing.assert_array_equal(transposed, x.T)


def test_outputs_along_another_axis():
    x = np.arange(8.0).reshape(2, 4)
    (got,) = v1.shard(
        lambda a: a,
        [tf.constant(x)],
        num_shards=4,
        input_shard_axes=[1],
        output_shard_axes=[1],
    )
    np.testing.assert_array_equal(_run(got), x)


def test_operations_run_when_an_output_is_read():
    outside = tf1.get_variable("calls", [], initializer=tf.zeros_initializer())

    def computation(x):
        return [x, outside.assign_add(1.0).op]

    (got,) = v1.shard(computation, [tf.constant([1.0, 2.0])], num_shards=2)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        session.run(got)
        assert session.run(outside) == 2
    none = v1.shard(lambda: outside.assign_add(1.0).op, num_shards=3)
    assert [type(op) for op in none] == [tf.Operation]


def _model(x):
    with tf1.variable_scope(None, "layer"):
        w = tf1.get_variable("w", [2])
        tf1.get_variable("s", [], trainable=False)
    b = tf.Variable([1.0, 2.0], name="b")
    return tf.reduce_sum(x) * w + b


def test_names_and_collections(tmp_path):
    with tf1.variable_scope("outer"):
        for _ in range(2):  # The second has names of its own.
            v1.shard(_model, [tf.zeros([6])], num_shards=3)
    plain = [
        "outer/layer/w",
        "outer/layer/s",
        "outer/b",
        "outer/layer_1/w",
        "outer/layer_1/s",
        "outer/b_1",
    ]
    assert [v.op.name for v in tf1.global_variables()] == plain
    assert [v.op.name for v in tf1.trainable_variables()] == [
        name for name in plain if not name.endswith("/s")
    ]
    copies = tf1.get_collection(v1.SHARD_VARIABLES)
    assert {v.op.name for v in copies} == {
        f"shard_{i}/{name}" for i in (1, 2) for name in plain
    }
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        path = tf1.train.Saver().save(session, str(tmp_path / "model"))
    assert [n for n, _ in tf.train.list_variables(path)] == sorted(plain)


def test_each_shard_finds_its_own_variables():
    seen = []

    def computation(x):
        w = tf1.get_variable("w", [])
        tf1.add_to_collection("mine", x)
        seen.append(
            [v.op.name for v in tf1.trainable_variables()]
            + [len(tf1.get_collection("mine"))]
        )
        return w * x

    v1.shard(computation, [tf.zeros([2])], num_shards=2)
    assert seen == [["w", 1], ["shard_1/w", 1]]
    assert len(tf1.get_collection("mine")) == 1


def test_copies_start_from_shard_0(tmp_path):
    """After initializers, and after a Saver that knows shard 0 only."""

    def computation(x):
        w = tf1.get_variable("w", [1])  # Random.
        return w + 0 * x

    (values,) = v1.shard(computation, [tf.zeros([4])], num_shards=4)
    w = tf1.global_variables()[0]
    saver = tf1.train.Saver()
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        first = session.run(values)
        np.testing.assert_array_equal(first, np.full(4, session.run(w)))
        session.run(w.assign([7.0]))
        path = saver.save(session, str(tmp_path / "model"))
        # The copies have values of their own by now.
        np.testing.assert_array_equal(session.run(values)[1:], first[1:])
        session.run(v1.shard_initializer())
        np.testing.assert_array_equal(session.run(values), [7.0] * 4)
    with tf1.Session() as session:
        saver.restore(session, path)
        np.testing.assert_array_equal(session.run(values), [7.0] * 4)


def test_slots_of_copies_start_before_the_first_update():
    """A copy that took shard 0's slot after its update would be ahead."""

    def computation(x):
        w = tf1.get_variable("w", [], initializer=tf.zeros_initializer())
        optimizer = v1.CrossShardOptimizer(
            tf1.train.MomentumOptimizer(1.0, 0.5)
        )
        return optimizer.minimize(tf.reduce_sum(x) * w)

    step = v1.shard(computation, [tf.ones([8])], num_shards=8)
    for _ in range(20):
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            session.run(step)
            session.run(step)
            copies = session.run(
                [
                    v
                    for v in tf1.get_collection(v1.SHARD_VARIABLES)
                    if v.op.name.endswith("/w")
                ]
            )
        np.testing.assert_array_equal(copies, [-2.5] * 7)


def test_shared_variables_are_updated_once():
    shared = tf1.get_variable("w", initializer=10.0)
    step = tf1.train.get_or_create_global_step()

    def computation(x):
        optimizer = v1.CrossShardOptimizer(tf1.train.AdagradOptimizer(1.0))
        return optimizer.minimize(tf.reduce_sum(x) * shared, global_step=step)

    op = v1.shard(computation, [tf.constant([1.0, 3.0])], num_shards=2)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        session.run(op)
        session.run(op)
        # The mean gradient is 2; Adagrad's accumulator starts at 0.1.
        expected = 10 - 2 / np.sqrt(4.1) - 2 / np.sqrt(8.1)
        np.testing.assert_allclose(session.run(shared), expected, rtol=1e-6)
        assert session.run(step) == 2


def test_learning_rates_see_one_global_step():
    def computation(x):
        w = tf1.get_variable("w", [], initializer=tf.zeros_initializer())
        step = tf1.train.get_or_create_global_step()
        rate = tf.cast(step + 1, tf.float32)
        optimizer = v1.CrossShardOptimizer(
            tf1.train.GradientDescentOptimizer(rate)
        )
        return optimizer.minimize(tf.reduce_sum(x) * w, global_step=step)

    op = v1.shard(computation, [tf.ones([4])], num_shards=4)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        for _ in range(3):
            session.run(op)
        assert session.run(tf1.train.get_global_step()) == 3
        copies = tf1.get_collection(v1.SHARD_VARIABLES)
        values = session.run([v for v in copies if v.op.name.endswith("/w")])
        np.testing.assert_array_equal(values, [-6.0] * 3)


def test_devices():
    seen = v1.shard(
        lambda x: [tf.identity(x), tf1.get_variable("w", [])][0],
        [tf.zeros([2])],
        num_shards=2,
        device_assignment=["/CPU:0", "/CPU:1"],
    )
    assert seen
    devices = {
        v.op.name: v.device
        for v in tf1.global_variables() + tf1.get_collection(v1.SHARD_VARIABLES)
    }
    assert devices["w"].endswith("CPU:0")
    assert devices["shard_1/w"].endswith("CPU:1")


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"num_shards": 0}, ValueError, "positive"),
        ({"num_shards": 2.0}, TypeError, "an int"),
        ({"inputs": (1,)}, TypeError, "a list"),
        ({"input_shard_axes": [0]}, ValueError, "input_shard_axes"),
        ({"output_shard_axes": [0]}, ValueError, "output_shard_axes"),
        ({"outputs_from_all_shards": [True]}, ValueError, "from_all_shards"),
        ({"infeed_queue": object()}, ValueError, "needs a TPU"),
        ({"xla_options": object()}, ValueError, "needs a TPU"),
        ({"device_assignment": ["/CPU:0"]}, ValueError, "2 devices"),
    ],
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        v1.shard(
            lambda: [tf.zeros([1]), tf.zeros([1])],
            **{"num_shards": 2, **arguments},
        )


def _apply(v):
    optimizer = v1.CrossShardOptimizer(tf1.train.GradientDescentOptimizer(1.0))
    return optimizer.apply_gradients([(tf.ones([]), v)])


def _in_cond():
    v = tf1.get_variable("v", [])
    return tf.cond(
        tf.constant(True),
        lambda: [_apply(v), tf.constant(1)][1],
        lambda: tf.constant(0),
    )


def _unequal():
    v = tf1.get_variable("v", [])
    # Python runs this for each shard.
    for _ in range(1 + tf1.get_default_graph().get_name_scope().count("shard")):
        op = _apply(v)
    return op


def _fewer():
    v = tf1.get_variable("v", [])
    if "shard_" not in tf1.get_default_graph().get_name_scope():
        return _apply(v)
    return None


def _other_variables():
    inside = "shard_" in tf1.get_default_graph().get_name_scope()
    return tf1.get_variable("v", [3 if inside else 2])


def _more_variables():
    tf1.get_variable("v", [])
    if "shard_" in tf1.get_default_graph().get_name_scope():
        tf1.get_variable("w", [])


@pytest.mark.parametrize(
    "computation, error, text",
    [
        (_in_cond, RuntimeError, "outside of it"),
        (_unequal, ValueError, "same number of times"),
        (_fewer, ValueError, "same number of times"),
        (_other_variables, ValueError, "same computation"),
        (_more_variables, ValueError, "same computation"),
        (lambda: v1.shard(lambda: None), RuntimeError, "another shard"),
        (lambda: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_computations_that_cannot_be_sharded(computation, error, text):
    """They end with an error, and leave everything usable."""
    with pytest.raises(error, match=text):
        v1.shard(computation, num_shards=3)
    (got,) = v1.shard(lambda x: x, [tf.ones([3])], num_shards=3)
    np.testing.assert_array_equal(_run(got, initialize=False), np.ones(3))


def test_eager_is_refused():
    with tf.init_scope():
        pass
    with pytest.raises(RuntimeError, match="in a tf.function"):
        with tf.__internal__.eager_context.eager_mode():
            v1.shard(lambda: None)


def test_in_a_function():
    with tf.__internal__.eager_context.eager_mode():
        w = tf.Variable(10.0)
        optimizer = v1.CrossShardOptimizer(
            tf1.train.MomentumOptimizer(1.0, 0.5)
        )

        @tf.function
        def step(x):
            def computation(x):
                return [
                    optimizer.minimize(
                        lambda: tf.reduce_mean(x) * w, var_list=[w]
                    ),
                    x,
                ]

            return v1.shard(computation, [x], num_shards=2)

        for _ in range(2):
            (got,) = step(tf.constant([1.0, 3.0]))
        np.testing.assert_array_equal(got, [1.0, 3.0])
        # Mean gradient 2: 10 - 2 - (1 + 2).
        assert w.numpy() == 5.0
