"""v1's AGNOptimizer: oracles, the getter, restarts, the saver."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import v1_oracle
from tf_xshard.compat import v1

tf1 = tf.compat.v1
NUM_STEPS = 8


@pytest.fixture(autouse=True)
def _graph():
    with tf.Graph().as_default():
        yield


def _initialize(session, *optimizers):
    session.run(
        [tf1.global_variables_initializer(), tf1.local_variables_initializer()]
    )
    session.run([one.get_init_op(0) for one in optimizers])


def _workers(name, num_workers, period, gradients):
    """NumPy: the variables, centers and accumulators after all steps.

    Workers take turns: at each step worker 0, then worker 1, ...
    """
    oracle, _ = v1_oracle.OPTIMIZERS[name]
    start = [np.ones((3, 2)), np.ones((4, 2))]
    # Slots of the center are shared; Adam's count is each worker's.
    center = [oracle(x) for x in start]
    local = [[oracle(x) for x in start] for _ in range(num_workers)]
    sums = [[np.zeros_like(x) for x in start] for _ in range(num_workers)]
    counts = [0] * num_workers
    exchanges = 0
    for step, of_workers in enumerate(gradients):
        for k, gs in enumerate(of_workers):
            counts[k] += 1
            for one, total, g in zip(local[k], sums[k], gs, strict=True):
                one.t = counts[k] - 1
                one.apply(g)
                total += g
            if (step + 1) % period == 0:
                counts[k] += 1
                exchanges += 1
                for one, total, x in zip(
                    center, sums[k], local[k], strict=True
                ):
                    one.t = counts[k] - 1
                    one.apply(total / period)
                    x.x = one.x.copy()
                    total[:] = 0
    return center, local, sums, exchanges


def _build(getter, make, period, inputs, use_resource=True, **kwargs):
    with tf1.variable_scope(
        "",
        custom_getter=getter,
        reuse=tf1.AUTO_REUSE,
        use_resource=use_resource,
    ):
        w = tf1.get_variable("w", initializer=np.ones((3, 2), np.float32))
        e = tf1.get_variable("e", [4, 2], initializer=tf.ones_initializer())
    dense, indices, values = inputs
    loss = tf.reduce_sum(dense * w) + tf.reduce_sum(
        values * tf.gather(e, indices)
    )
    optimizer = v1.AGNOptimizer(make(), 1, getter, period, **kwargs)
    return w, e, loss, optimizer


def _placeholders():
    return [
        tf1.placeholder(array[0].dtype, array[0].shape)
        for array in v1_oracle.gradients(1, 0)
    ]


def _feeds(num_workers):
    """For each step and worker: the arrays, and the gradients they give."""
    for step in range(NUM_STEPS):
        dense, indices, values = v1_oracle.gradients(num_workers, step)
        yield [
            (
                (dense[k], indices[k], values[k]),
                (dense[k], v1_oracle.as_dense(indices[k], values[k])),
            )
            for k in range(num_workers)
        ]


VARIANTS = [
    pytest.param(True, True, id="resource-v2"),
    pytest.param(True, False, id="resource-v1"),
    pytest.param(False, False, id="ref-v1"),
    pytest.param(False, True, id="ref-v2"),
]


@pytest.mark.parametrize("use_resource, v2", VARIANTS)
@pytest.mark.parametrize("period", [1, 2, 3])
@pytest.mark.parametrize("name", v1_oracle.OPTIMIZERS)
def test_oracle(name, period, use_resource, v2):
    was_v2 = tf1.control_flow_v2_enabled()
    (tf1.enable_control_flow_v2 if v2 else tf1.disable_control_flow_v2)()
    try:
        _check_oracle(name, period, use_resource)
    finally:
        (
            tf1.enable_control_flow_v2
            if was_v2
            else tf1.disable_control_flow_v2
        )()


def _check_oracle(name, period, use_resource):
    _, make = v1_oracle.OPTIMIZERS[name]
    getter = v1.AGNCustomGetter("/CPU:0")
    inputs = _placeholders()
    w, e, loss, optimizer = _build(getter, make, period, inputs, use_resource)
    unused = tf1.get_variable("not_trained", [], trainable=False)
    del unused
    step = tf1.train.get_or_create_global_step()
    pairs = optimizer.compute_gradients(loss, [w, e])
    train = optimizer.apply_gradients(((g, v) for g, v in pairs), step)
    assert isinstance(train, tf.Operation)
    feeds = list(_feeds(1))
    with tf1.Session() as session:
        _initialize(session, optimizer)
        for ((arrays, _),) in feeds:
            session.run(train, dict(zip(inputs, arrays, strict=True)))
        got = session.run(
            [
                [list(getter.copies_of(v)) for v in (w, e)],
                step,
                [
                    [optimizer.get_slot(x, s) for x in getter.copies_of(w)[:2]]
                    for s in optimizer.get_slot_names()
                ],
            ]
        )
    center, local, sums, exchanges = _workers(
        name, 1, period, [[g for _, g in one] for one in feeds]
    )
    positions = [0] if name == "momentum" else [0, 1]  # e's is sparse.
    for i in positions:
        for value, expected in zip(
            got[0][i], (local[0][i].x, center[i].x, sums[0][i]), strict=True
        ):
            np.testing.assert_allclose(value, expected, rtol=3e-5, atol=3e-6)
    assert got[1] == exchanges == NUM_STEPS // period
    assert optimizer.get_slot_names() == list(local[0][0].slots)
    for values, s in zip(got[2], local[0][0].slots, strict=True):
        for value, expected in zip(
            values, (local[0][0], center[0]), strict=True
        ):
            np.testing.assert_allclose(
                value, expected.state[s], rtol=3e-5, atol=3e-6
            )


@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "adam"])
def test_two_workers_in_one_graph(name):
    """They share the center and its slots, and nothing else."""
    _, make = v1_oracle.OPTIMIZERS[name]
    workers = []
    for k in range(2):
        getter = v1.AGNCustomGetter("/CPU:0")

        def shared(getter, name, *args, agn=getter, k=k, **kwargs):
            """Each worker's variables have a prefix; the center has none."""

            def one(name, *args, **kwargs):
                if not name.startswith("global_center_variable"):
                    name = f"worker_{k}/{name}"
                return getter(name, *args, **kwargs)

            return agn(one, name, *args, **kwargs)

        inputs = _placeholders()
        with tf1.variable_scope("", custom_getter=shared, reuse=tf1.AUTO_REUSE):
            w = tf1.get_variable("w", initializer=np.ones((3, 2), np.float32))
        optimizer = v1.AGNOptimizer(make(), 2, getter, 2)
        loss = tf.reduce_sum(inputs[0] * w)
        workers.append((inputs, getter.copies_of(w), optimizer, loss))
    centers = [copies.center for _, copies, _, _ in workers]
    assert centers[0] is centers[1]
    trains = [
        optimizer.minimize(loss, var_list=[copies.local])
        for _, copies, optimizer, loss in workers
    ]
    feeds = list(_feeds(2))
    with tf1.Session() as session:
        _initialize(session, *[w[2] for w in workers])
        for step in feeds:
            for (inputs, *_), train, (arrays, _) in zip(
                workers, trains, step, strict=True
            ):
                session.run(train, {inputs[0]: arrays[0]})
        got = session.run([list(w[1]) for w in workers])
    expected = _two_workers(name, [[g for _, g in one] for one in feeds])
    for k in range(2):
        for value, wanted in zip(got[k], expected[k], strict=True):
            np.testing.assert_allclose(value, wanted, rtol=3e-5, atol=3e-6)


def _two_workers(name, gradients):
    """As `_workers`, with center slots of each worker's optimizer.

    In one graph each optimizer object makes its own slots for the center; over
    processes they have one name and are one.
    """
    oracle, _ = v1_oracle.OPTIMIZERS[name]
    x = np.ones((3, 2))
    local = [oracle(x) for _ in range(2)]
    center = [oracle(x) for _ in range(2)]
    sums = [np.zeros_like(x) for _ in range(2)]
    counts = [0, 0]
    value = x
    for step, of_workers in enumerate(gradients):
        for k, gs in enumerate(of_workers):
            counts[k] += 1
            local[k].t = counts[k] - 1
            local[k].apply(gs[0])
            sums[k] += gs[0]
            if step % 2:
                counts[k] += 1
                center[k].t = counts[k] - 1
                center[k].x = value
                center[k].apply(sums[k] / 2)
                value = center[k].x
                local[k].x = value.copy()
                sums[k][:] = 0
    return [(local[k].x, value, sums[k]) for k in range(2)]


def test_the_oracle_needs_the_division():
    gradients = [[g for _, g in one] for one in _feeds(1)]
    right = _workers("adagrad", 1, 2, gradients)[0][0].x
    doubled = _workers(
        "adagrad", 1, 2, [[(2 * a, 2 * b)] for [(a, b)] in gradients]
    )
    assert np.abs(right - doubled[0][0].x).max() > 1e-3


def test_the_getter():
    getter = v1.AGNCustomGetter("/CPU:1")
    with tf1.variable_scope("s", custom_getter=getter):
        with tf.device("/CPU:2"):
            w = tf1.get_variable(
                "w", [2], regularizer=lambda x: tf.reduce_sum(x)
            )
            fixed = tf1.get_variable("fixed", [2], trainable=False)
        parts = tf1.get_variable(
            "p", [4, 2], partitioner=tf1.fixed_size_partitioner(2)
        )
    with tf1.variable_scope("s", custom_getter=getter, reuse=True):
        assert tf1.get_variable("w", [2]) is w
    local, center, accumulator = getter.copies_of(w)
    assert local is w
    assert center.op.name == "global_center_variable/s/w"
    assert accumulator.op.name == "grad_variable/s/w"
    assert [v.device[-5:] for v in (local, center, accumulator, fixed)] == [
        "CPU:1",
        "CPU:2",
        "CPU:1",
        "CPU:2",
    ]
    parts = list(parts)
    assert len(parts) == 2
    for part in parts:
        assert part.op.name in getter.copies_of(part).center.op.name
    assert tf1.trainable_variables() == [w, *parts]
    assert w in tf1.local_variables() and w not in tf1.global_variables()
    assert center in tf1.global_variables()
    assert accumulator in tf1.local_variables()
    assert fixed in tf1.global_variables()
    losses = tf1.get_collection(tf1.GraphKeys.REGULARIZATION_LOSSES)
    assert len(losses) == 1
    assert len(getter.all_copies()) == 3
    with pytest.raises(ValueError, match="variable_scope"):
        getter.copies_of(fixed)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"initializer": 3.0},
        {"initializer": lambda: tf.constant([3.0, 4.0])},
        {"initializer": [3.0, 4.0]},
        {"shape": [2], "initializer": tf1.random_normal_initializer()},
        {"shape": [2], "dtype": tf.float64},
        {"shape": [2]},
    ],
)
def test_accumulators_start_at_zero(kwargs):
    getter = v1.AGNCustomGetter("/CPU:0")
    with tf1.variable_scope("", custom_getter=getter):
        w = tf1.get_variable("w", **kwargs)
    copies = getter.copies_of(w)
    assert {v.dtype.base_dtype for v in copies} == {w.dtype.base_dtype}
    with tf1.Session() as session:
        session.run(
            [
                tf1.global_variables_initializer(),
                tf1.local_variables_initializer(),
            ]
        )
        value = session.run(copies.accumulator)
    assert value.shape == tuple(w.shape) and not value.any()


def _simple(period=2, inner=None, **kwargs):
    getter = v1.AGNCustomGetter("/CPU:0")
    with tf1.variable_scope("", custom_getter=getter):
        w = tf1.get_variable("w", initializer=10.0)
    inner = inner or tf1.train.GradientDescentOptimizer(1.0)
    optimizer = v1.AGNOptimizer(inner, 1, getter, period, **kwargs)
    return getter.copies_of(w), optimizer


def test_the_hook_adopts_the_center_in_every_session():
    copies, optimizer = _simple(period=3)
    train = optimizer.minimize(copies.local * 1.0)
    hook = optimizer.make_session_run_hook(is_chief=True, task_index=0)
    changed = copies.center.assign(50.0)
    with tf1.train.MonitoredTrainingSession(hooks=[hook]) as session:
        assert session.run(copies.local) == 10.0
        session.run(train)
        assert session.run([copies.local, copies.accumulator]) == [9.0, 1.0]
        raw = session._tf_sess()
        raw.run(changed)
        hook.after_create_session(raw, None)  # As after a restart.
        assert session.run([copies.local, copies.accumulator]) == [50.0, 0.0]
        for _ in range(2):  # The local step went on; this is its third.
            session.run(train)
        assert session.run(copies.center) == 50.0 - 2 / 3 * 1.0


def test_the_saver_and_going_on(tmp_path):
    prefix = str(tmp_path / "model")
    copies, optimizer = _simple(
        period=2, inner=tf1.train.MomentumOptimizer(1.0, 0.5)
    )
    train = optimizer.minimize(copies.local * 1.0)
    saver = optimizer.swapping_saver()
    with tf1.Session() as session:
        _initialize(session, optimizer)
        for _ in range(3):
            session.run(train)
        saver.save(session, prefix)
        at_save, slot = session.run(
            [copies.center, optimizer.get_slot(copies.center, "momentum")]
        )
    assert dict(tf.train.list_variables(prefix)) == {"w": [], "w/Momentum": []}
    with tf.Graph().as_default(), tf1.Session() as session:
        plain = tf1.get_variable("w", initializer=0.0)
        tf1.train.Saver().restore(session, prefix)
        assert session.run(plain) == at_save == 9.0
    with tf.Graph().as_default(), tf1.Session() as session:
        again, other = _simple(
            period=2, inner=tf1.train.MomentumOptimizer(1.0, 0.5)
        )
        train = other.minimize(again.local * 1.0)
        session.run(tf1.local_variables_initializer())
        other.swapping_saver().restore(session, prefix)
        session.run(other.get_init_op(0))
        assert session.run(list(again)) == [9.0, 9.0, 0.0]
        assert session.run(other.get_slot(again.center, "momentum")) == slot
        for _ in range(2):
            session.run(train)
        # The mean gradient 1: momentum 0.5 * 1 + 1.
        assert session.run(again.center) == 9.0 - 1.5


def test_the_saver_of_partitioned_variables(tmp_path):
    getter = v1.AGNCustomGetter("/CPU:0")
    partitioner = tf1.fixed_size_partitioner(2)
    with tf1.variable_scope("", custom_getter=getter, partitioner=partitioner):
        tf1.get_variable("w", [4])
    optimizer = v1.AGNOptimizer(
        tf1.train.GradientDescentOptimizer(1.0), 1, getter
    )
    with tf1.Session() as session:
        _initialize(session, optimizer)
        prefix = str(tmp_path / "model")
        optimizer.swapping_saver().save(session, prefix)
        centers = session.run([c.center for c in getter.all_copies()])
    assert len(centers) == 2
    for given in (partitioner, None):
        with tf.Graph().as_default(), tf1.Session() as session:
            with tf1.variable_scope("", partitioner=given):
                w = tf1.get_variable("w", [4])
            tf1.train.Saver().restore(session, prefix)
            np.testing.assert_array_equal(
                session.run(tf.convert_to_tensor(w)), np.concatenate(centers)
            )


def test_collections_and_variables():
    copies, optimizer = _simple(inner=tf1.train.AdamOptimizer(0.1))
    optimizer.minimize(copies.local * 1.0)
    assert {v.op.name for v in tf1.global_variables()} == {
        "global_center_variable/w",
        "global_center_variable/w/Adam",
        "global_center_variable/w/Adam_1",
    }
    assert {v.op.name for v in tf1.local_variables()} == {
        "w",
        "grad_variable/w",
        "local_step",
        "w/Adam",
        "w/Adam_1",
        "beta1_power",
        "beta2_power",
    }
    assert {v.op.name for v in optimizer.variables()} == {
        v.op.name for v in tf1.local_variables() + tf1.global_variables()
    } - {"w", "global_center_variable/w"}
    assert optimizer.get_slot_names() == ["m", "v"]


def test_two_optimizers_in_one_scope():
    getter = v1.AGNCustomGetter("/CPU:0")
    with tf1.variable_scope("", custom_getter=getter):
        a = tf1.get_variable("a", initializer=10.0)
        b = tf1.get_variable("b", initializer=10.0)
    trains = []
    for variable, period in ((a, 1), (b, 2)):
        one = v1.AGNOptimizer(
            tf1.train.GradientDescentOptimizer(1.0), 1, getter, period
        )
        trains.append(one.minimize(variable * 2.0, var_list=[variable]))
    with tf1.Session() as session:
        _initialize(session, one)
        session.run(trains)
        centers = [getter.copies_of(v).center for v in (a, b)]
        assert session.run(centers) == [8.0, 10.0]


def test_none_gradients():
    getter = v1.AGNCustomGetter("/CPU:0")
    with tf1.variable_scope("", custom_getter=getter):
        a = tf1.get_variable("a", initializer=10.0)
        b = tf1.get_variable("b", initializer=10.0)
    optimizer = v1.AGNOptimizer(
        tf1.train.GradientDescentOptimizer(1.0), 1, getter, 1
    )
    train = optimizer.apply_gradients([(None, b), (tf.constant(3.0), a)])
    with tf1.Session() as session:
        _initialize(session, optimizer)
        session.run(train)
        got = session.run([list(getter.copies_of(v)) for v in (a, b)])
    assert got == [[7.0, 7.0, 0.0], [10.0, 10.0, 0.0]]


def test_names_and_constants():
    copies, optimizer = _simple(name="Mine")
    assert isinstance(optimizer, tf1.train.Optimizer)
    assert optimizer.get_name() == "Mine"
    pairs = [(tf.constant(1.0), copies.local)]
    assert optimizer.apply_gradients(pairs).name.startswith("Mine/")
    assert optimizer.apply_gradients(pairs, name="other").name.startswith(
        "other/"
    )
    assert (optimizer.GATE_NONE, optimizer.GATE_OP, optimizer.GATE_GRAPH) == (
        0,
        1,
        2,
    )


@pytest.mark.parametrize("use_locking", [True, False])
def test_use_locking(use_locking):
    getter = v1.AGNCustomGetter("/CPU:0")
    with tf1.variable_scope("", custom_getter=getter, use_resource=False):
        w = tf1.get_variable("w", initializer=10.0)
    optimizer = v1.AGNOptimizer(
        tf1.train.GradientDescentOptimizer(1.0),
        1,
        getter,
        use_locking=use_locking,
    )
    optimizer.get_init_op(0)
    optimizer.apply_gradients([(tf.constant(1.0), w)])
    flags = {
        op.get_attr("use_locking")
        for op in tf1.get_default_graph().get_operations()
        if op.type == "AssignAdd"
    }
    assert flags == {use_locking}


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"optimizer": None}, TypeError, "optimizer must be"),
        ({"optimizer": keras.optimizers.SGD()}, TypeError, "optimizer must"),
        ({"custom_getter": None}, TypeError, "custom_getter must be"),
        ({"num_worker": 0}, ValueError, "num_worker must be positive"),
        ({"num_worker": "2"}, TypeError, "num_worker must be an int"),
        ({"communication_period": 0}, ValueError, "must be positive"),
        ({"communication_period": -3}, ValueError, "must be positive"),
        ({"communication_period": 2.0}, TypeError, "must be an int"),
        ({"communication_period": None}, TypeError, "must be an int"),
        ({"name": ""}, ValueError, "name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments(arguments, error, text):
    good = {
        "optimizer": tf1.train.GradientDescentOptimizer(1.0),
        "num_worker": 1,
        "custom_getter": v1.AGNCustomGetter("/CPU:0"),
    }
    with pytest.raises(error, match=text):
        v1.AGNOptimizer(**{**good, **arguments})


def test_bad_calls():
    with pytest.raises(TypeError, match="worker_device must be"):
        v1.AGNCustomGetter(None)
    copies, optimizer = _simple()
    other = tf1.get_variable("other", [])
    for pairs, error in (
        ([], ValueError),
        ([(None, copies.local)], ValueError),
        ([(tf.ones([]), other)], ValueError),
        ([copies.local], ValueError),
        ([("text", copies.local)], (TypeError, ValueError)),
        (None, TypeError),
    ):
        with pytest.raises(error):
            optimizer.apply_gradients(pairs)
    empty = v1.AGNOptimizer(
        tf1.train.GradientDescentOptimizer(1.0),
        1,
        v1.AGNCustomGetter("/CPU:0"),
    )
    with pytest.raises(ValueError, match="has made no trainable"):
        empty.get_init_op(0)


@pytest.mark.parametrize("function", [True, False])
def test_eager_and_in_a_function(function):
    with tf.__internal__.eager_context.eager_mode():
        copies, optimizer = _simple(
            period=2, inner=tf1.train.MomentumOptimizer(1.0, 0.5)
        )
        step = tf.Variable(0)
        assert optimizer.get_init_op(0) is None
        x = tf.Variable(0.0)

        def update():
            optimizer.minimize(
                lambda: copies.local * x, step, var_list=[copies.local]
            )

        update = tf.function(update) if function else update
        seen = []
        for i in range(1, 5):
            x.assign(i)
            update()
            seen.append(
                (float(copies.local), float(copies.center), step.numpy())
            )
    # Local: 10 - 1; momentum 0.5 + 2; center: mean 1.5. Then 3 + 1.25 and 4 +
    # 2.125 locally, and the center's momentum 0.75 + 3.5.
    assert seen == [
        (9.0, 10.0, 0),
        (8.5, 8.5, 1),
        (8.5 - 4.25, 8.5, 1),
        (8.5 - 4.25, 8.5 - 4.25, 2),
    ]


def test_checkpoint(tmp_path):
    with tf.__internal__.eager_context.eager_mode():
        values = []
        for restore in (False, True):
            copies, optimizer = _simple(
                period=3, inner=tf1.train.AdamOptimizer(0.1)
            )
            optimizer.get_init_op(0)
            checkpoint = tf.train.Checkpoint(
                optimizer=optimizer,
                **{name: v for name, v in copies._asdict().items()},
            )

            def train(steps, copies=copies, optimizer=optimizer):
                for i in range(steps):
                    optimizer.minimize(
                        lambda i=i: copies.local * (i + 1.0),
                        var_list=[copies.local],
                    )

            if restore:
                train(1)
                path = tf.train.latest_checkpoint(tmp_path)
                checkpoint.restore(path).assert_consumed()
            else:
                train(5)
                checkpoint.save(str(tmp_path / "model"))
            train(4)
            values.append([float(v) for v in copies])
        assert values[0] == values[1]
