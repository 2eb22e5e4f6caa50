"""`shard` executes what `tf.compat.v1.tpu.shard` is documented to do."""

import keras
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
        assert session.run(outside) == 1  # Once, as in the copies of a TPU.
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


X = np.array([1.0, 2.0, 3.0, 6.0], np.float32)


def _zeros(name):
    return tf1.get_variable(name, [], initializer=tf.zeros_initializer())


def _all_values(session):
    variables = tf1.global_variables() + tf1.get_collection(v1.SHARD_VARIABLES)
    return {v.op.name: float(session.run(v)) for v in variables}


def _minimize(optimizer, loss, **kwargs):
    return v1.CrossShardOptimizer(optimizer).minimize(loss, **kwargs)


@pytest.mark.parametrize("wrap", [False, True], ids=["adam", "wrapped"])
def test_one_inner_optimizer_for_all_shards(wrap):
    """Made outside: its beta powers must not be multiplied by each shard."""

    class Wrapper(tf1.train.Optimizer):
        def __init__(self, base):
            super().__init__(False, "Wrapper")
            self.base = base

        def apply_gradients(self, *args, **kwargs):
            return self.base.apply_gradients(*args, **kwargs)

    def train(shared):
        def make():
            adam = tf1.train.AdamOptimizer(0.1)
            return Wrapper(adam) if wrap else adam

        outside = make()

        def computation(x):
            w = _zeros("w")
            return _minimize(
                outside if shared else make(), tf.reduce_mean((x - w) ** 2)
            )

        with tf.Graph().as_default(), tf1.Session() as session:
            train = v1.shard(computation, [tf.constant(X)], 2)
            session.run(tf1.global_variables_initializer())
            for _ in range(3):
                session.run(train)
            return _all_values(session)

    got = train(shared=True)
    assert got == train(shared=False)
    assert got["w"] == got["shard_1/w"]
    np.testing.assert_allclose(got["shard_1/beta1_power"], 0.9**4, rtol=1e-6)


@pytest.mark.parametrize("every", [True, False, [True, False]], ids=str)
def test_all_shards_train_whatever_is_read(every):
    def computation(x):
        w = _zeros("w")
        loss = tf.reduce_mean(-x * w)
        train = _minimize(tf1.train.GradientDescentOptimizer(1.0), loss)
        with tf.control_dependencies([train]):
            outputs = [tf.identity(loss), tf.identity(x)]
        return outputs if isinstance(every, list) else outputs[0]

    outputs = v1.shard(
        computation, [tf.constant(X)], 2, outputs_from_all_shards=every
    )
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        for _ in range(2):
            session.run(outputs[-1])
        assert _all_values(session) == {"w": 6.0, "shard_1/w": 6.0}


def test_several_calls_share_variables_by_reuse():
    def computation(other):
        def of(x):
            with tf1.variable_scope("", reuse=tf1.AUTO_REUSE):
                a, b = _zeros("a"), _zeros(other)
            assert {a, b} <= set(tf1.trainable_variables())
            return _minimize(
                tf1.train.GradientDescentOptimizer(1.0),
                tf.reduce_mean(-x * (a + b)),
                var_list=[a, b],
            )

        return of

    ops = [
        v1.shard(computation(other), [tf.constant(X)], n)
        for other, n in (("b", 2), ("c", 2), ("d", 4))
    ]
    for first in range(3):  # Any of them may run first.
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for position in range(3):
                session.run(ops[(first + position) % 3])
            got = _all_values(session)
        assert {name.split("/")[-1] for name in got} == set("abcd")
        assert got["a"] == got["shard_1/a"] == 9.0
        assert got["shard_1/b"] == got["shard_1/c"] == got["shard_3/d"] == 3.0


def test_train_and_evaluate_with_one_adam():
    optimizer = v1.CrossShardOptimizer(tf1.train.AdamOptimizer(0.1))

    def computation(train):
        def of(x):
            with tf1.variable_scope("", reuse=tf1.AUTO_REUSE):
                w = _zeros("w")
            loss = tf.reduce_mean((x - w) ** 2)
            return optimizer.minimize(loss) if train else loss

        return of

    train, again = (
        v1.shard(computation(True), [tf.constant(X)], 2) for _ in range(2)
    )
    (loss,) = v1.shard(computation(False), [tf.constant(X)], 2)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        np.testing.assert_array_equal(session.run(loss), [2.5, 22.5])
        session.run([train])
        session.run([again])
        got = _all_values(session)
    assert got["w"] == got["shard_1/w"] != 0
    for power in ("beta1_power", "shard_1/beta1_power"):
        np.testing.assert_allclose(got[power], 0.9**3, rtol=1e-6)
    assert sorted(got) == sorted(
        prefix + name
        for prefix in ("", "shard_1/")
        for name in ("w", "w/Adam", "w/Adam_1", "beta1_power", "beta2_power")
    )


def test_a_variable_from_outside_by_reuse():
    outside = _zeros("w")

    def computation(x):
        with tf1.variable_scope("", reuse=tf1.AUTO_REUSE):
            w = _zeros("w")
        assert w is outside
        return _minimize(
            tf1.train.GradientDescentOptimizer(1.0), tf.reduce_mean(-x * w)
        )

    op = v1.shard(computation, [tf.constant(X)], 2)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        session.run(op)
        assert _all_values(session) == {"w": 3.0}


def test_shards_may_list_variables_in_another_order():
    """Sets of variables, as in GANs, have one that depends on addresses."""
    calls = []

    def computation(x):
        a, b = _zeros("a"), _zeros("b")
        calls.append(1)
        return _minimize(
            tf1.train.GradientDescentOptimizer(1.0),
            tf.reduce_mean(-x * a - 10 * x * b),
            var_list=[a, b] if len(calls) % 2 else [b, a],
        )

    op = v1.shard(computation, [tf.constant(X)], 2)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        session.run(op)
        assert _all_values(session) == {
            "a": 3.0,
            "b": 30.0,
            "shard_1/a": 3.0,
            "shard_1/b": 30.0,
        }


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf1.Variable(0, name="global_step", trainable=False),
        lambda: tf1.get_variable("global_step", initializer=0, trainable=False),
        tf1.train.get_or_create_global_step,
    ],
    ids=["variable", "get_variable", "get_or_create"],
)
def test_a_global_step_of_ones_own(make):
    def computation(x):
        step = make()
        w = _zeros("w")
        return _minimize(
            tf1.train.GradientDescentOptimizer(1.0),
            tf.reduce_mean(-x * w),
            global_step=step,
        )

    op = v1.shard(computation, [tf.constant(X)], 2)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        for _ in range(2):
            session.run(op)
        got = _all_values(session)
    assert got["global_step"] == got["shard_1/global_step"] == 2
    assert got["w"] == got["shard_1/w"] == 6.0


def test_tables_made_inside():
    def computation(x):
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer([1, 2], [10.0, 20.0]), 0.0
        )
        return table.lookup(x)

    (got,) = v1.shard(computation, [tf.constant([1, 2])], 2)
    with tf1.Session() as session:
        session.run(tf1.tables_initializer())
        np.testing.assert_array_equal(session.run(got), [10.0, 20.0])


def test_moving_averages_are_each_shards_own():
    def computation(x):
        with tf1.variable_scope("bn"):
            mean = tf1.get_variable(
                "moving_mean",
                [],
                initializer=tf.zeros_initializer(),
                trainable=False,
            )
        update = mean.assign(0.5 * mean + 0.5 * tf.reduce_mean(x))
        tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, update)
        with tf.control_dependencies(
            tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)
        ):
            return tf.identity(x)

    (got,) = v1.shard(computation, [tf.constant(X)], 2)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        session.run(got)
        assert _all_values(session) == {
            "bn/moving_mean": 0.75,
            "shard_1/bn/moving_mean": 2.25,
        }


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

        @tf.function(autograph=False)
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


def test_a_keras_optimizer_in_a_function():
    with tf.__internal__.eager_context.eager_mode():
        w = tf.Variable(10.0)
        optimizer = v1.CrossShardOptimizer(
            keras.optimizers.SGD(1.0, momentum=0.5)
        )

        @tf.function(autograph=False)
        def step(x):
            def computation(x):
                optimizer.minimize(lambda: tf.reduce_mean(x) * w, var_list=[w])
                return x

            return v1.shard(computation, [x], num_shards=2)

        for _ in range(2):
            step(tf.constant([1.0, 3.0]))
        assert w.numpy() == 5.0


@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize("how", ["assign", "assign_add", "apply_gradients"])
def test_a_global_step_made_before_is_incremented_once(how, use_resource):
    """As BERT does, beside apply_gradients; learning rates depend on it."""
    tf1.get_variable_scope().set_use_resource(use_resource)
    step = tf1.train.get_or_create_global_step()

    def computation(x):
        own = tf1.train.get_or_create_global_step()
        rate = 1.0 / (1.0 + tf.cast(own, tf.float32))
        w = tf1.get_variable("w", [], initializer=tf1.zeros_initializer())
        train = v1.CrossShardOptimizer(tf1.train.GradientDescentOptimizer(rate))
        loss = tf.reduce_mean(w * x)
        if how == "apply_gradients":
            done = train.minimize(loss, global_step=own)
        else:
            add = {
                "assign": lambda: own.assign(own + 1),
                "assign_add": lambda: tf1.assign_add(own, 1),
            }[how]
            done = tf.group(train.minimize(loss), add())
        with tf.control_dependencies([done]):
            return tf.identity(rate)

    (rates,) = v1.shard(computation, [tf.ones([4])], num_shards=4)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        seen = [session.run(rates).tolist() for _ in range(10)]
        np.testing.assert_allclose(
            seen, [[1 / (1 + k)] * 4 for k in range(10)], rtol=1e-6
        )
        assert session.run(step) == 10
        values = _all_values(session)
        weights = [v for k, v in values.items() if k.split("/")[-1] == "w"]
        np.testing.assert_allclose(
            weights, [-sum(1 / (1 + k) for k in range(10))] * 4, rtol=1e-6
        )


def test_what_is_read_after_an_assignment_is_the_new_value():
    total = tf1.get_variable("total", [], initializer=tf1.zeros_initializer())

    def computation(x):
        with tf.control_dependencies([total.assign(total + 3.0)]):
            return total.read_value() + 0 * x

    (values,) = v1.shard(computation, [tf.ones([3])], num_shards=3)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        assert session.run(values).tolist() == [3, 3, 3]
        assert session.run(values).tolist() == [6, 6, 6]
        assert session.run(total) == 6


def test_in_a_function_a_shared_variable_can_not_be_assigned():
    with tf.__internal__.eager_context.eager_mode():
        step = tf.Variable(0)

        @tf.function(autograph=False)
        def run():
            return v1.shard(
                lambda x: x + tf.cast(step.assign_add(1), tf.float32),
                [tf.ones([2])],
                num_shards=2,
            )

        with pytest.raises(ValueError, match="assign it after"):
            run()


@pytest.mark.parametrize("gather", [tf.gather, tf.gather_nd])
def test_in_a_function_a_shared_variable_can_be_read(gather):
    with tf.__internal__.eager_context.eager_mode():
        table = tf.Variable([1.0, 10.0, 100.0])

        @tf.function(autograph=False)
        def run():
            return v1.shard(
                lambda x: x + gather(table, [[2]])[0],
                [tf.ones([2])],
                num_shards=2,
            )

        (got,) = run()
        assert got.numpy().tolist() == [101, 101]


def test_names_inside_the_computation_are_those_that_the_user_gave():
    """GANs, freezing and fine-tuning select variables by their names."""
    seen = []

    def computation(x):
        for scope in ("generator", "critic"):
            with tf1.variable_scope(scope):
                w = tf1.get_variable("w", [])
        with tf.name_scope("generator"):
            tf1.add_to_collection("losses", tf.identity(w * x, name="loss"))
        trainable = tf1.trainable_variables()
        seen.append(
            [v.name for v in tf1.trainable_variables("generator")]
            + [v.name for v in trainable if v.name.startswith("critic")]
            + [len(tf1.get_collection("losses", scope="generator"))]
        )
        return w * x

    v1.shard(computation, [tf.zeros([2])], num_shards=2)
    assert seen == [["generator/w:0", "critic/w:0", 1]] * 2
    names = {v.name for v in tf1.get_collection(v1.SHARD_VARIABLES)}
    assert names == {"shard_1/generator/w:0", "shard_1/critic/w:0"}
