"""v1's AGNOptimizer: oracles, the getter, restarts, the saver."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.compat.v1 import graphs
from tests.support import v1_oracle
from tf_xshard.compat import v1

tf1 = tf.compat.v1
NUM_STEPS = 6
pytestmark = pytest.mark.usefixtures("graph")


@contextlib.contextmanager
def _session(optimizer):
    """A session whose worker starts from the center."""
    start = optimizer.get_init_op(0)
    with graphs.session() as session:
        session.run(start)
        yield session


def _getter(use_resource=True, **kwargs):
    """A getter, and a variable scope in which it makes variables."""
    getter = v1.AGNCustomGetter("/CPU:0")
    return getter, tf1.variable_scope(
        "", custom_getter=getter, use_resource=use_resource, **kwargs
    )


@pytest.mark.parametrize(
    "name, period, use_resource, v2",
    [
        ("sgd", 1, True, True),
        ("adagrad", 2, False, True),
        ("adam", 3, True, False),
        ("adagrad", 2, False, False),
    ],
)
def test_oracle(name, period, use_resource, v2):
    oracle, make = v1_oracle.OPTIMIZERS[name]
    getter, scope = _getter(use_resource)
    inputs = graphs.placeholders(1)
    with graphs.control_flow(v2):
        with scope:
            w, e = graphs.variables()
        step = tf1.train.get_or_create_global_step()
        optimizer = v1.AGNOptimizer(make(), 1, getter, period, v2, name="Mine")
        loss = graphs.loss(*(one[0] for one in inputs), w, e)
        pairs = optimizer.compute_gradients(loss, [w, e])
        train = optimizer.apply_gradients(iter(pairs), step)
        assert train.type == "NoOp" and train.name.startswith("Mine/")
        copies = [list(getter.copies_of(v)) for v in (w, e)]
        local, center, _ = copies[0]
        slots = [graphs.with_slots(optimizer, v) for v in (local, center)]
        assert set(slots[0]) <= set(tf1.local_variables())
        assert set(slots[1]) <= set(tf1.global_variables())
        assert optimizer.get_slot_names() == list(oracle.slots)
        workers = [
            v1_oracle.AGNWorker(oracle(np.ones(v.shape)), period)
            for v in (w, e)
        ]
        with _session(optimizer) as session:
            for dense, indices, values in graphs.feeds(1, NUM_STEPS):
                arrays = (dense, indices, values)
                session.run(train, dict(zip(inputs, arrays, strict=True)))
                workers[0].step(dense[0])
                workers[1].step(v1_oracle.as_dense(indices[0], values[0]))
            got = session.run([copies, slots, step])
    expected = [worker.values() for worker in workers]
    with_slots = [workers[0].local.values(), workers[0].center.values()]
    expected = [expected, with_slots, NUM_STEPS // period]
    graphs.check_close(got, expected, 3e-5, 3e-6)
    flags = [
        op.get_attr("use_locking")
        for op in tf1.get_default_graph().get_operations()
        if op.type in ("Assign", "AssignAdd") and "Mine" in op.name
    ]
    assert set(flags) == (set() if use_resource else {v2})


def test_the_getter():
    getter = v1.AGNCustomGetter("/CPU:1")
    with tf1.variable_scope("s", custom_getter=getter):
        with tf.device("/CPU:2"):
            w = tf1.get_variable("w", [2], regularizer=tf.reduce_sum)
            fixed = tf1.get_variable("fixed", [2], trainable=False)
        halves = tf1.fixed_size_partitioner(2)
        parts = list(tf1.get_variable("p", [4, 2], partitioner=halves))
    with tf1.variable_scope("s", custom_getter=getter, reuse=True):
        assert tf1.get_variable("w", [2]) is w
    local, center, accumulator = getter.copies_of(w)
    assert local is w
    assert center.op.name == "global_center_variable/s/w"
    assert accumulator.op.name == "grad_variable/s/w"
    devices = [v.device[-5:] for v in (local, accumulator, center, fixed)]
    assert devices == ["CPU:1", "CPU:1", "CPU:2", "CPU:2"]
    centers = [getter.copies_of(part).center for part in parts]
    for part, of_part in zip(parts, centers, strict=True):
        assert part.op.name in of_part.op.name
    assert tf1.trainable_variables() == [w, *parts]
    assert len(tf1.losses.get_regularization_losses()) == 1
    assert len(getter.all_copies()) == 3
    assert tf1.global_variables() == [center, fixed, *centers]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"initializer": 3.0},
        {"initializer": lambda: tf.constant([3.0, 4.0])},
        {"shape": [2], "initializer": tf1.random_normal_initializer()},
        {"shape": [2], "dtype": tf.float64},
    ],
)
def test_accumulators_start_at_zero(kwargs):
    getter, scope = _getter()
    with scope:
        tf1.get_variable("w", **kwargs)
    [copies] = getter.all_copies()
    assert len({(v.dtype.base_dtype, *v.shape) for v in copies}) == 1
    with graphs.session() as session:
        assert not session.run(copies.accumulator).any()


def _with_momentum(getter):
    momentum = tf1.train.MomentumOptimizer(1.0, 0.5)
    return v1.AGNOptimizer(momentum, 1, getter, 2)


def test_the_saver_and_going_on(tmp_path):
    """Slices of a partitioned variable are saved under its name."""
    prefix = str(tmp_path / "model")

    def build():
        getter, scope = _getter(partitioner=tf1.fixed_size_partitioner(2))
        with scope:
            ten = tf1.constant_initializer(10.0)
            w = tf1.get_variable("w", [2], initializer=ten)
        optimizer = _with_momentum(getter)
        train = optimizer.minimize(tf.reduce_sum(tf.convert_to_tensor(w)))
        copies = getter.all_copies()
        slots = [optimizer.get_slot(one.center, "momentum") for one in copies]
        return optimizer, train, optimizer.swapping_saver(), [copies, slots]

    optimizer, train, saver, _ = build()
    with _session(optimizer) as session:
        for _ in range(3):
            session.run(train)
        saver.save(session, prefix)
    names = {"w": [2], "w/Momentum": [2]}
    assert dict(tf.train.list_variables(prefix)) == names
    assert tf.train.load_variable(prefix, "w").tolist() == [9.0, 9.0]
    with tf.Graph().as_default(), tf1.Session() as session:
        optimizer, train, saver, fetches = build()
        session.run(tf1.local_variables_initializer())
        saver.restore(session, prefix)
        session.run(optimizer.get_init_op(0))
        copies, slots = session.run(fetches)
        assert copies == [([9.0], [9.0], [0.0])] * 2
        assert slots == [[1.0], [1.0]]
        for _ in range(2):
            session.run(train)
        # The mean gradient 1: momentum 0.5 * 1 + 1.
        copies, _ = session.run(fetches)
        assert [one.center for one in copies] == [[9.0 - 1.5]] * 2


def test_two_optimizers_in_one_scope_and_none_gradients():
    getter, scope = _getter()
    with scope:
        a, b = (tf1.get_variable(n, initializer=10.0) for n in "ab")
    trains = []
    for variable, other, period in ((a, b, 1), (b, a, 2)):
        one = v1.AGNOptimizer(graphs.descent(), 1, getter, period)
        pairs = [(None, other), (tf.constant(2.0), variable)]
        trains.append(one.apply_gradients(pairs))
    with _session(one) as session:
        session.run(trains)
        got = session.run([list(getter.copies_of(v)) for v in (a, b)])
    # The local variable, the center, the accumulator.
    assert got == [[8.0, 8.0, 0.0], [8.0, 10.0, 2.0]]


def test_refusals():
    getter = v1.AGNCustomGetter("/CPU:0")
    descent = graphs.descent()
    for arguments, error, text in (
        ((keras.optimizers.SGD(), 1, getter), TypeError, "optimizer must"),
        ((descent, 1, None), TypeError, "custom_getter must be"),
        ((descent, "2", getter), TypeError, "num_worker must be an int"),
        ((descent, 1, getter, 0), ValueError, "must be positive"),
        ((descent, 1, getter, 1, True, ""), ValueError, "name"),
    ):
        with pytest.raises(error, match=text):
            v1.AGNOptimizer(*arguments)
    with pytest.raises(TypeError, match="worker_device must be"):
        v1.AGNCustomGetter(None)
    optimizer = v1.AGNOptimizer(descent, 1, getter)
    with pytest.raises(ValueError, match="has made no trainable"):
        optimizer.get_init_op(0)
    other = tf1.get_variable("other", [])
    with pytest.raises(ValueError, match="was not made by this optimizer's"):
        optimizer.apply_gradients([(tf.ones([]), other)])


@pytest.mark.parametrize("function", [True, False])
def test_eager_and_in_a_function(function, tmp_path):
    """A checkpoint in mid-period has all state."""
    with tf.__internal__.eager_context.eager_mode():
        getter, scope = _getter()
        with scope:
            local = tf1.get_variable("w", initializer=10.0)
        copies, optimizer = getter.copies_of(local), _with_momentum(getter)
        step, x = tf.Variable(0), tf.Variable(0.0)
        assert optimizer.get_init_op(0) is None
        checkpoint = tf.train.Checkpoint(
            optimizer=optimizer, step=step, **copies._asdict()
        )

        def update():
            optimizer.minimize(lambda: local * x, step, var_list=[local])

        update = tf.function(update) if function else update

        def train(gradients):
            seen = []
            for gradient in gradients:
                x.assign(gradient)
                update()
                seen.append([float(v) for v in (*copies[:2], step)])
            return seen

        # Local: 10 - 1; momentum 0.5 + 2; center: mean 1.5. Then 3 + 1.25 and
        # 4 + 2.125 locally, and the center's momentum 0.75 + 3.5.
        expected = [[9.0, 10.0, 0], [8.5, 8.5, 1], [4.25, 8.5, 1]]
        last = [[4.25, 4.25, 2]]
        assert train([1, 2, 3]) == expected
        path = checkpoint.save(str(tmp_path / "model"))
        assert train([4]) == last
        train([5])
        checkpoint.restore(path).assert_consumed()
        assert train([4]) == last
