"""`shard` executes what `tf.compat.v1.tpu.shard` is documented to do."""

import numpy as np
import pytest
import tensorflow as tf

from tests.compat.v1 import graphs
from tests.support import v1_oracle
from tf_xshard.compat import v1

tf1 = tf.compat.v1
X = np.array([1.0, 2.0, 3.0, 6.0], np.float32)
pytestmark = pytest.mark.usefixtures("graph")


def _zeros(name):
    return tf1.get_variable(name, [], initializer=tf.zeros)


def _is_first():
    return graphs.is_first("shard_")


def _minimize(loss, rate=1.0, **kwargs):
    optimizer = v1.CrossShardOptimizer(graphs.descent(rate))
    return optimizer.minimize(loss, **kwargs)


def _names(variables):
    return [v.op.name for v in variables]


def _copies():
    return tf1.get_collection(v1.SHARD_VARIABLES)


def _variables():
    """All variables and copies, by name."""
    return {v.op.name: v for v in tf1.global_variables() + _copies()}


def _values_after(op, num_steps=1):
    return graphs.run_steps(op, _variables(), feeds=[()] * num_steps)


def test_inputs_are_split_and_outputs_joined():
    x = np.arange(24.0).reshape(4, 6)
    got = v1.shard(
        lambda a, b: [a * 2, tf.reduce_sum(b), a, tf.transpose(b), b],
        [tf.constant(x), tf.constant(x)],
        num_shards=2,
        input_shard_axes=[0, 1],
        outputs_from_all_shards=[True, True, False, True, True],
        output_shard_axes=[0, 0, 0, 0, 1],
    )
    sums = np.array([x[:, :3].sum(), x[:, 3:].sum()])
    with tf1.Session() as session:
        graphs.check_close(session.run(got), [2 * x, sums, x[:2], x.T, x], 0, 0)


def test_names_and_collections_inside_and_outside_of_shards(tmp_path):
    """GANs, freezing and fine-tuning select variables by their names."""
    seen = []

    def computation(x):
        with tf1.variable_scope(None, "critic"):
            w = tf1.get_variable("w", [2])
            tf1.get_variable("s", [], trainable=False)
        b = tf.Variable([1.0, 2.0], name="b")
        with tf.name_scope("critic"):
            tf1.add_to_collection("losses", tf.identity(w + b, name="loss"))
        trainable = tf1.trainable_variables()
        seen.append(
            _names(trainable)
            + _names(tf1.trainable_variables("outer/critic"))
            + [v.name for v in trainable if v.name.startswith("outer/b")]
            + [len(tf1.get_collection("losses", scope="outer/critic"))]
        )
        return tf.reduce_sum(x) * w

    with tf1.variable_scope("outer"):
        for _ in range(2):  # The second has names of its own.
            v1.shard(computation, [tf.zeros([2])], num_shards=2)
    first = ["outer/critic/w", "outer/critic/s", "outer/b"]
    plain = [*first, "outer/critic_1/w", "outer/critic_1/s", "outer/b_1"]
    assert _names(tf1.global_variables()) == plain
    trainable = [name for name in plain if not name.endswith("/s")]
    assert _names(tf1.trainable_variables()) == trainable
    assert _names(_copies()) == [f"shard_1/{name}" for name in plain]
    assert {v.name for v in _copies()} == {f"shard_1/{n}:0" for n in plain}
    assert seen[0] == [*trainable[:2], "outer/critic/w", "outer/b:0", 1]
    assert seen[1] == [*(f"shard_1/{n}" for n in seen[0][:3]), "outer/b:0", 1]
    assert len(tf1.get_collection("losses")) == 2
    with graphs.session() as session:
        path = tf1.train.Saver().save(session, str(tmp_path / "model"))
    assert [n for n, _ in tf.train.list_variables(path)] == sorted(plain)


def test_copies_start_from_shard_0(tmp_path):
    """After initializers, and after a Saver that knows shard 0 only."""

    def computation(x):
        w = tf1.get_variable("w", [1])  # Random.
        return w + 0 * x

    (values,) = v1.shard(computation, [tf.zeros([4])], num_shards=4)
    [w] = tf1.global_variables()
    saver = tf1.train.Saver()
    with graphs.session() as session:
        [first] = session.run(w)
        assert session.run(values).tolist() == [first] * 4
        session.run(w.assign([7.0]))
        path = saver.save(session, str(tmp_path / "model"))
        # The copies have values of their own by now.
        assert session.run(values).tolist() == [7.0, *[first] * 3]
        session.run(v1.shard_initializer())
        assert session.run(values).tolist() == [7.0] * 4
    with tf1.Session() as session:
        saver.restore(session, path)
        assert session.run(values).tolist() == [7.0] * 4


@pytest.mark.parametrize("every", [True, False, [True, False]], ids=str)
def test_all_shards_train_whatever_is_read(every):
    def computation(x):
        loss = tf.reduce_mean(-x * _zeros("w"))
        with tf.control_dependencies([_minimize(loss)]):
            outputs = [tf.identity(loss), tf.identity(x)]
        return outputs if isinstance(every, list) else outputs[0]

    options = {"num_shards": 2, "outputs_from_all_shards": every}
    outputs = v1.shard(computation, [tf.constant(X)], **options)
    assert _values_after(outputs[-1], 2) == {"w": 6.0, "shard_1/w": 6.0}


class _Skipping(tf1.train.Optimizer):
    """Leaves out the updates with large gradients."""

    def __init__(self, optimizer):
        super().__init__(False, "Skipping")
        self.optimizer = optimizer

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        [pair] = grads_and_vars
        apply = lambda: self.optimizer.apply_gradients([pair], *args, **kwargs)
        return tf.cond(pair[0] < 100, apply, tf.no_op)


@pytest.mark.parametrize(
    "wrap", [lambda one: one, _Skipping], ids=["adam", "wrapped"]
)
def test_calls_share_variables_and_one_adam(wrap):
    """Its beta powers must not be multiplied by each shard."""
    optimizer = v1.CrossShardOptimizer(wrap(tf1.train.AdamOptimizer(0.1)))

    def loss_of(x):
        with tf1.variable_scope("", reuse=tf1.AUTO_REUSE):
            return tf.reduce_mean((x - _zeros("w")) ** 2)

    train, again = (
        v1.shard(lambda x: optimizer.minimize(loss_of(x)), [tf.constant(X)], 2)
        for _ in range(2)
    )
    (loss,) = v1.shard(loss_of, [tf.constant(X)], 4)
    oracle = v1_oracle.Adam(0.0)
    with graphs.session() as session:
        np.testing.assert_array_equal(session.run(loss), X**2)
        for step in (train, again, train):
            session.run([step])
            oracle.apply(2 * (oracle.x - X.mean()))
        got = session.run(_variables())
    names = ["w", "w/Adam", "w/Adam_1", "beta1_power", "beta2_power"]
    expected = [oracle.x, *oracle.state.values(), 0.9**4, 0.999**4]
    for prefix in ("", "shard_1/"):
        found = [got.pop(prefix + name) for name in names]
        graphs.check_close(found, expected)
    assert got == {"shard_2/w": 0.0, "shard_3/w": 0.0}


@pytest.mark.parametrize("v2", [False, True])
def test_an_update_is_skipped_in_the_wrapped_optimizer(v2):
    """Adam does not count it either."""

    step = tf1.train.get_or_create_global_step()

    def computation(x):
        skipping = _Skipping(tf1.train.AdamOptimizer(0.1))
        pairs = [(tf.reduce_sum(x), _zeros("w"))]
        return v1.CrossShardOptimizer(skipping).apply_gradients(pairs, step)

    x = tf1.placeholder(tf.float32, [2])
    with graphs.control_flow(v2):
        op = v1.shard(computation, [x], num_shards=2)
    oracle = v1_oracle.Adam(0.0)
    with graphs.session() as session:
        for one in ([1, 1], [200, 1], [1, 2]):
            session.run(op, {x: one})
            if max(one) < 100:
                oracle.apply(sum(one))
            got = session.run(_variables())
            assert got["global_step"] == oracle.t
            weights = [got["w"], got["shard_1/w"]]
            np.testing.assert_allclose(weights, [oracle.x] * 2, rtol=1e-5)


def test_shards_may_list_variables_in_another_order():
    """Sets of variables, as in GANs, have one that depends on addresses."""

    def computation(x):
        variables = [_zeros("a"), _zeros("b")]
        loss = tf.reduce_mean(-x * variables[0] - 10 * x * variables[1])
        order = 1 if _is_first() else -1
        return _minimize(loss, var_list=variables[::order])

    expected = {"a": 3.0, "b": 30.0, "shard_1/a": 3.0, "shard_1/b": 30.0}
    assert _values_after(v1.shard(computation, [tf.constant(X)], 2)) == expected


@pytest.mark.parametrize(
    "how, use_resource",
    [
        # As BERT does, next to apply_gradients.
        ("assign", True),
        ("assign", False),
        ("assign_add", False),
        ("apply_gradients", True),
    ],
    ids=["assign", "assign_ref", "assign_add", "apply"],
)
def test_a_global_step_is_incremented_once(how, use_resource):
    """Learning rates of all shards depend on it."""
    tf1.get_variable_scope().set_use_resource(use_resource)
    step = tf1.train.get_or_create_global_step()

    def computation(x):
        rate = 1.0 / (1.0 + tf.cast(step, tf.float32))
        loss = tf.reduce_mean(_zeros("w") * x)
        counted = step if how == "apply_gradients" else None
        done = [_minimize(loss, rate, global_step=counted)]
        if how == "assign":
            done.append(step.assign(step + 1))
        elif how == "assign_add":
            done.append(tf1.assign_add(step, 1))
        with tf.control_dependencies(done):
            return tf.identity(rate)

    (rates,) = v1.shard(computation, [tf.ones([4])], num_shards=4)
    with graphs.session() as session:
        seen = [session.run(rates).tolist() for _ in range(4)]
        got = session.run(_variables())
    assert got.pop("global_step") == 4
    expected = [1 / (1 + k) for k in range(4)]
    np.testing.assert_allclose(seen, [[r] * 4 for r in expected], rtol=1e-6)
    np.testing.assert_allclose([*got.values()], [-sum(expected)] * 4, rtol=1e-6)


def test_tables_moving_averages_and_devices():
    def computation(x):
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer([1, 2], [10.0, 20.0]), 0.0
        )
        mean = _zeros("moving_mean")
        update = mean.assign(0.5 * mean + 0.5 * tf.reduce_mean(x))
        tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, update)
        updates = tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)
        with tf.control_dependencies(updates):
            return table.lookup(tf.cast(x, tf.int32))

    options = {"num_shards": 2, "device_assignment": ["/CPU:0", "/CPU:1"]}
    (got,) = v1.shard(computation, [tf.constant(X)], **options)
    with graphs.session(num_cpus=2) as session:
        session.run(tf1.tables_initializer())
        assert session.run(got).tolist() == [10.0, 20.0, 0.0, 0.0]
        means = {"moving_mean": 0.75, "shard_1/moving_mean": 2.25}
        assert session.run(_variables()) == means
    variables = tf1.global_variables() + _copies()
    assert [v.device[-6:] for v in variables] == [":CPU:0", ":CPU:1"]


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"num_shards": 0}, ValueError, "positive"),
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
    computation = lambda: [tf.zeros([1]), tf.zeros([1])]
    with pytest.raises(error, match=text):
        v1.shard(computation, **{"num_shards": 2, **arguments})
    with tf.__internal__.eager_context.eager_mode():
        with pytest.raises(RuntimeError, match="in a tf.function"):
            v1.shard(lambda: None)


def _apply():
    optimizer = v1.CrossShardOptimizer(graphs.descent())
    with tf1.variable_scope("", reuse=tf1.AUTO_REUSE):
        return optimizer.apply_gradients([(tf.ones([]), _zeros("v"))])


def _in_cond():
    _zeros("v")
    return tf.cond(tf.constant(True), _apply, tf.no_op)


# Python runs these functions for each shard.
_unequal = lambda: [_apply() for _ in range(1 if _is_first() else 2)]
_fewer = lambda: _apply() if _is_first() else _zeros("v")
_other_shapes = lambda: tf1.get_variable("v", [2 if _is_first() else 3])
_more_variables = lambda: list(map(_zeros, "v" if _is_first() else "vw"))


@pytest.mark.parametrize(
    "computation, error, text",
    [
        (_in_cond, RuntimeError, "top level.*whose apply_gradients calls"),
        (_unequal, ValueError, "same number of times"),
        (_fewer, ValueError, "same number of times"),
        (_other_shapes, ValueError, "same computation"),
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
    with tf1.Session() as session:
        assert session.run(got).tolist() == [1.0] * 3


def test_what_is_read_after_an_assignment_is_the_new_value():
    total = _zeros("total")

    def computation(x):
        with tf.control_dependencies([total.assign(total + 3.0)]):
            return total.read_value() + 0 * x

    (values,) = v1.shard(computation, [tf.ones([3])], num_shards=3)
    assert graphs.run_steps(values, values).tolist() == [6.0] * 3


def test_in_a_function_a_shared_variable_is_read_and_not_assigned():
    with tf.__internal__.eager_context.eager_mode():
        table = tf.Variable([1.0, 10.0, 100.0])

        @tf.function(autograph=False)
        def sharded(read):
            return v1.shard(lambda x: x + read()[0], [tf.ones([2])], 2)

        (got,) = sharded(
            lambda: tf.gather(table, [2]) + tf.gather_nd(table, [[1]])
        )
        assert got.numpy().tolist() == [111, 111]
        with pytest.raises(ValueError, match="assign it after"):
            sharded(lambda: table.assign_add([1.0, 1.0, 1.0]))
