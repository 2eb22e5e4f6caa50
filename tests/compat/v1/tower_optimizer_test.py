"""v1's TowerOptimizer and replicate_model_fn: oracles, splitting, pooling."""

import threading
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn import datasets

from tests.support import v1_oracle
from tf_xshard.compat import v1

tf1 = tf.compat.v1
R = tf1.losses.Reduction
NUM_STEPS = 4


def _towers(num, model_fn, reduction=R.MEAN, **kwargs):
    return v1.replicate_model_fn(
        model_fn, reduction, devices=["/CPU:0"] * num, **kwargs
    )


def _train(spec, feeds=({},), fetches=()):
    with tf1.Session() as session:
        session.run(
            [
                tf1.global_variables_initializer(),
                tf1.local_variables_initializer(),
            ]
        )
        for feed in feeds:
            session.run(spec.train_op, feed)
        return session.run(fetches)


@pytest.fixture(autouse=True)
def _graph():
    with tf.Graph().as_default():
        yield


@pytest.mark.parametrize("reduction", [R.MEAN, R.SUM])
@pytest.mark.parametrize("name", v1_oracle.OPTIMIZERS)
@pytest.mark.parametrize("num_towers", [1, 2, 4])
def test_oracle(num_towers, name, reduction):
    """Dense, sparse, mixed, partly missing and missing gradients."""
    oracle, make = v1_oracle.OPTIMIZERS[name]
    slots = {}

    def model_fn(features, labels, mode):
        del labels
        dense, indices, values = (features[k][0] for k in "div")
        index = len(slots)
        w = tf1.get_variable("w", initializer=np.ones((3, 2), np.float32))
        e = tf1.get_variable("e", initializer=np.ones((4, 2), np.float32))
        m = tf1.get_variable("m", initializer=np.ones((4, 2), np.float32))
        p = tf1.get_variable("p", initializer=np.ones((3, 2), np.float32))
        tf1.get_variable("unused", initializer=1.0)
        loss = tf.reduce_sum(dense * w)
        loss += tf.reduce_sum(values * tf.gather(e, indices))
        rows = tf.IndexedSlices(values, indices, tf.constant([4, 2]))
        if index % 2:  # Sparse in some towers, dense in others.
            loss += tf.reduce_sum(values * tf.gather(m, indices))
        else:
            loss += tf.reduce_sum(tf.convert_to_tensor(rows) * m)
        if index == 0:
            loss += tf.reduce_sum(dense * p)
        optimizer = v1.TowerOptimizer(make)
        pairs = optimizer.compute_gradients(loss)
        train = optimizer.apply_gradients(
            ((g, v) for g, v in pairs),  # The original loses a generator's.
            tf1.train.get_or_create_global_step(),
        )
        slots[index] = [
            optimizer.get_slot(v, s) for v in (w, e, m, p) for s in oracle.slots
        ]
        return v1.EstimatorSpec(mode, loss=loss, train_op=train)

    inputs = [
        tf1.placeholder(array.dtype, array.shape)
        for array in v1_oracle.gradients(num_towers, 0)
    ]
    spec = _towers(num_towers, model_fn, reduction)(
        dict(zip("div", inputs, strict=True)), None, "train"
    )
    steps = [v1_oracle.gradients(num_towers, s) for s in range(NUM_STEPS)]
    got = _train(
        spec,
        [dict(zip(inputs, arrays, strict=True)) for arrays in steps],
        [
            tf1.trainable_variables()[:4],
            slots[num_towers - 1],
            tf1.train.get_global_step(),
        ],
    )
    expected = [oracle(np.ones(s)) for s in ((3, 2), (4, 2), (4, 2), (3, 2))]
    factor = 1 if reduction == R.SUM else 1 / num_towers
    for dense, indices, values in steps:
        rows = [
            v1_oracle.as_dense(i, v)
            for i, v in zip(indices, values, strict=True)
        ]
        for one, g in zip(
            expected, (sum(dense), sum(rows), sum(rows), dense[0]), strict=True
        ):
            one.apply(factor * g)
    if name != "momentum":  # Its sparse update leaves other rows alone.
        _close(got[0], [one.x for one in expected])
        _close(got[1], [one.state[s] for one in expected for s in oracle.slots])
    else:
        _close(got[0][::3], [one.x for one in expected[::3]])
        _close(got[0][1], _sparse_momentum(steps, factor))
    assert got[2] == NUM_STEPS


def _sparse_momentum(steps, factor):
    x, momentum = np.ones((4, 2)), np.zeros((4, 2))
    for _, indices, values in steps:
        g = factor * sum(
            v1_oracle.as_dense(i, v)
            for i, v in zip(indices, values, strict=True)
        )
        rows = np.unique(indices)
        momentum[rows] = 0.9 * momentum[rows] + g[rows]
        x[rows] -= 0.1 * momentum[rows]
    return x


def _close(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def _digits_model(features, labels, mode, params):
    x = tf.reshape(features["image"], [-1, 64])
    w = tf1.get_variable("w", [64, 32], initializer=params["init"])
    b = tf1.get_variable("b", [32], initializer=tf.zeros_initializer())
    k = tf1.get_variable("k", [32, 10], initializer=params["init"])
    hidden = tf.nn.relu(x @ w + b)
    with tf1.variable_scope(None, "head"):
        scale = tf1.get_variable("scale", [], initializer=tf.ones_initializer())
    logits = hidden @ k * scale
    predictions = {"digit": tf.argmax(logits, 1), "logits": logits}
    if mode == v1.ModeKeys.PREDICT:
        return v1.EstimatorSpec(
            mode,
            predictions=predictions,
            export_outputs={
                "all": v1.PredictOutput({"logits": logits}),
                "class": v1.ClassificationOutput(
                    scores=logits,
                    classes=tf.as_string(tf.math.top_k(logits, 2).indices),
                ),
                "value": v1.RegressionOutput(logits[:, 0]),
            },
        )
    loss = tf1.losses.sparse_softmax_cross_entropy(labels, logits)
    metrics = {
        "accuracy": tf1.metrics.accuracy(labels, predictions["digit"]),
        "logit": tf1.metrics.mean(logits),
    }
    train_op = None
    if mode == v1.ModeKeys.TRAIN:
        optimizer = v1.TowerOptimizer(params["make"])
        train_op = optimizer.minimize(
            loss, global_step=tf1.train.get_or_create_global_step()
        )
    return v1.EstimatorSpec(
        mode,
        loss=loss,
        train_op=train_op,
        predictions=predictions,
        eval_metric_ops=metrics,
    )


def _digits():
    x, y = datasets.load_digits(return_X_y=True)
    return (x.reshape(-1, 8, 8) / 16).astype(np.float32), y.astype(np.int64)


def _train_digits(num_towers, make, num_steps=60, batch_size=64):
    params = {"init": tf1.glorot_uniform_initializer(seed=3), "make": make}
    x, y = _digits()
    with tf.Graph().as_default():
        images = tf1.placeholder(tf.float32, [batch_size, 8, 8])
        labels = tf1.placeholder(tf.int64, [batch_size])
        spec = _towers(num_towers, _digits_model)(
            {"image": images}, labels, "train", params
        )
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for step in range(num_steps):
                start = step * batch_size % (len(x) - 2 * batch_size)
                rows = slice(start, start + batch_size)
                loss, _ = session.run(
                    [spec.loss, spec.train_op],
                    {images: x[rows], labels: y[rows]},
                )
            return session.run(tf1.trainable_variables()), loss


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf1.train.AdamOptimizer(0.01),
        lambda: tf1.train.MomentumOptimizer(0.1, 0.9),
    ],
    ids=["adam", "momentum"],
)
def test_digits_on_1_2_and_4_towers(make, report):
    one, loss = _train_digits(1, make)
    assert loss < 0.8  # It starts above 2.3.
    for num_towers in (2, 4):
        weights, _ = _train_digits(num_towers, make)
        largest = max(
            np.abs(a - b).max() for a, b in zip(one, weights, strict=True)
        )
        report(f"digits, {num_towers} towers: max |dw| {largest:.1e}")
        assert largest <= 2e-5


@pytest.mark.parametrize("reduction", [R.MEAN, R.SUM])
def test_evaluation_pools_the_towers(reduction):
    x, y = _digits()
    params = {"init": tf1.glorot_uniform_initializer(seed=3), "make": None}
    got = {}
    for num_towers in (1, 4):
        with tf.Graph().as_default(), tf1.Session() as session:
            images, labels = tf.constant(x[:80]), tf.constant(y[:80])
            spec = _towers(num_towers, _digits_model, reduction)(
                {"image": images}, labels, "eval", params
            )
            session.run(
                [
                    tf1.global_variables_initializer(),
                    tf1.local_variables_initializer(),
                ]
            )
            for _ in range(2):
                session.run([u for _, u in spec.eval_metric_ops.values()])
            values = {k: v for k, (v, _) in spec.eval_metric_ops.items()}
            got[num_towers] = session.run([values, spec.loss])
    for name in ("accuracy", "logit"):
        np.testing.assert_allclose(got[4][0][name], got[1][0][name], rtol=1e-5)
    factor = 4 if reduction == R.SUM else 1
    np.testing.assert_allclose(got[4][1], factor * got[1][1], rtol=1e-5)


def test_predictions_and_exports_are_joined():
    x, _ = _digits()
    params = {"init": tf1.glorot_uniform_initializer(seed=3), "make": None}
    got = {}
    for num_towers in (1, 4):
        with tf.Graph().as_default(), tf1.Session() as session:
            spec = _towers(num_towers, _digits_model)(
                {"image": tf.constant(x[:8])}, None, "infer", params
            )
            session.run(tf1.global_variables_initializer())
            got[num_towers] = session.run(
                [
                    spec.predictions,
                    spec.export_outputs["all"].outputs,
                    spec.export_outputs["class"].scores,
                    spec.export_outputs["class"].classes,
                    spec.export_outputs["value"].value,
                ]
            )
            assert isinstance(
                spec.export_outputs["class"], v1.ClassificationOutput
            )
    for one, other in zip(
        tf.nest.flatten(got[1]), tf.nest.flatten(got[4]), strict=True
    ):
        assert one.shape == other.shape
        if one.dtype.kind == "f":
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(one, other)


def test_splitting_of_structures():
    seen = []

    def model_fn(features, labels, mode):
        seen.append((features, labels))
        return v1.EstimatorSpec(mode, predictions=features["a"][0])

    features = {
        "a": [tf.reshape(tf.range(8), [4, 2]), (tf.range(4.0), None)],
        "s": tf.SparseTensor([[0, 1], [2, 0], [3, 1]], [5, 6, 7], [4, 2]),
    }
    _towers(2, model_fn)(features, tf.range(4), "infer")
    with tf1.Session() as session:
        for i, (got, labels) in enumerate(seen):
            assert got["a"][1][1] is None
            np.testing.assert_array_equal(
                session.run(got["a"][0]),
                np.arange(8).reshape(4, 2)[2 * i :][:2],
            )
            np.testing.assert_array_equal(
                session.run(labels), [2 * i, 2 * i + 1]
            )
            np.testing.assert_array_equal(
                session.run(tf.sparse.to_dense(got["s"])),
                np.array([[0, 5], [0, 0], [6, 0], [0, 7]])[2 * i :][:2],
            )


def _scalar_model(features, labels, mode, *, calls=1, optimizer=None):
    del labels
    w = tf1.get_variable("w", initializer=10.0)
    loss = tf.reduce_mean(features) * w
    optimizer = optimizer or v1.TowerOptimizer(
        tf1.train.GradientDescentOptimizer(1.0)
    )
    train = tf.group(*[optimizer.minimize(loss) for _ in range(calls)])
    return v1.EstimatorSpec(mode, loss=loss, train_op=train)


def test_several_optimizers_and_losses():
    def model_fn(features, labels, mode):
        del labels
        a = tf1.get_variable("a", initializer=10.0)
        b = tf1.get_variable("b", initializer=10.0)
        first = v1.TowerOptimizer(tf1.train.GradientDescentOptimizer(1.0))
        second = v1.TowerOptimizer(tf1.train.MomentumOptimizer(2.0, 0.5))
        losses = [tf.reduce_mean(features) * a, tf.reduce_sum(features) * b]
        step = tf1.train.get_or_create_global_step()
        ops = [
            first.minimize(losses[0], step, var_list=[a]),
            second.minimize(losses[1], var_list=[b]),
        ]
        return v1.EstimatorSpec(
            mode, loss=tf.add_n(losses), train_op=tf.group(*ops)
        )

    spec = _towers(2, model_fn)(tf.constant([1.0, 3.0]), None, "train")
    got = _train(
        spec,
        [{}, {}],
        [tf1.trainable_variables(), tf1.train.get_global_step()],
    )
    # Towers' gradients 1 and 3, mean 2; momentum 2, then 0.5 * 2 + 2.
    assert got == [[10 - 2 - 2, 10 - 4 - 6], 2]


# TensorFlow's queue runners end with an error when their session is closed.
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
def test_sync_replicas_optimizer_inside():
    made = []

    def make():
        made.append(
            tf1.train.SyncReplicasOptimizer(
                tf1.train.GradientDescentOptimizer(1.0),
                replicas_to_aggregate=1,
                total_num_replicas=1,
            )
        )
        return made[-1]

    def model_fn(features, labels, mode):
        del labels
        w = tf1.get_variable("w", initializer=10.0)
        loss = tf.reduce_mean(features) * w
        optimizer = v1.TowerOptimizer(make)
        train = optimizer.minimize(
            loss, global_step=tf1.train.get_or_create_global_step()
        )
        hooks = []
        if len(made) and made[-1]._gradients_applied:
            hooks = [made[-1].make_session_run_hook(is_chief=True)]
        return v1.EstimatorSpec(
            mode, loss=loss, train_op=train, training_hooks=hooks
        )

    spec = _towers(2, model_fn)(tf.constant([1.0, 3.0]), None, "train")
    assert len(spec.training_hooks) == 1  # The last tower's spec.
    with tf1.train.MonitoredTrainingSession(
        hooks=list(spec.training_hooks), stop_grace_period_secs=1
    ) as session:
        session.run(spec.train_op)
        # A queue runner's thread applies; the step may return before it.
        deadline = time.monotonic() + 10
        while session.run(tf1.trainable_variables()) != [8.0]:
            assert time.monotonic() < deadline
    for thread in threading.enumerate():
        if "QueueRunner" in thread.name:
            thread.join(10)


def test_devices():
    seen = []

    def model_fn(features, labels, mode):
        del labels
        w = tf1.get_variable("w", initializer=1.0)
        with tf.device("/CPU:3"):
            explicit = tf.identity(w)
        seen.append((w.device, (features * w).device, explicit.device))
        return v1.EstimatorSpec(mode, predictions=features * w)

    v1.replicate_model_fn(model_fn, devices=["/CPU:1", "/CPU:2"])(
        tf.zeros([2]), None, "infer"
    )
    ends = [[device[-5:] for device in one] for one in seen]
    assert ends == [["CPU:0", "CPU:1", "CPU:3"], ["CPU:0", "CPU:2", "CPU:3"]]


def test_name_scopes_and_params():
    seen = []
    given = {"list": []}

    def model_fn(features, labels, mode, params, config):
        del labels, config
        seen.append(tf1.get_default_graph().get_name_scope())
        params["list"].append(1)
        return v1.EstimatorSpec(mode, predictions=features)

    with tf.name_scope("outer"):
        _towers(3, model_fn)(tf.zeros([3]), None, "infer", params=given)
    assert seen == ["outer", "outer/tower_1", "outer/tower_2"]
    assert given == {"list": []}


@pytest.mark.parametrize("kind", ["namespace", "namedtuple", "dataclass"])
def test_any_object_with_the_fields(kind):
    import collections
    import dataclasses

    names = v1.EstimatorSpec._fields
    make = {
        "namespace": types.SimpleNamespace,
        "namedtuple": collections.namedtuple("Spec", names),
        "dataclass": dataclasses.make_dataclass("Spec", names),
    }[kind]

    def model_fn(features, labels, mode):
        return make(**_scalar_model(features, labels, mode)._asdict())

    spec = _towers(2, model_fn)(tf.constant([1.0, 3.0]), None, "train")
    assert type(spec) is make or kind == "namespace"
    assert _train(spec, [{}], tf1.trainable_variables()) == [8.0]


def test_towers_that_were_wrapped_vouch_for_no_others():
    features = tf.constant([1.0, 3.0])
    _towers(2, _scalar_model)(features, None, "train")
    assert not v1.TowerOptimizer.has_been_used()
    with tf1.variable_scope("other"):
        with pytest.raises(ValueError, match="Please wrap"):
            _towers(2, _not_wrapped)(features, None, "train")


def test_one_tower_and_none():
    """Everything goes to the wrapped optimizer."""
    inner = tf1.train.MomentumOptimizer(1.0, 0.5, name="Mine")
    optimizer = v1.TowerOptimizer(inner)
    assert not v1.TowerOptimizer.has_been_used()
    assert optimizer.get_name() == "Mine"
    assert v1.TowerOptimizer.has_been_used()
    w = tf1.get_variable("w", initializer=10.0)
    step = tf1.train.get_or_create_global_step()
    train = optimizer.minimize(w * w, global_step=step, name="train")
    assert train.name == "train"
    assert optimizer.get_slot_names() == ["momentum"]
    assert optimizer.variables() == inner.variables()
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        session.run(train)
        assert session.run([w, step]) == [-10.0, 1]
        assert session.run(optimizer.get_slot(w, "momentum")) == 20.0
    spec = _towers(1, _scalar_model)
    with tf1.variable_scope("one"):
        assert spec(tf.constant([2.0]), None, "train").loss is not None


def test_a_factory_is_called_once():
    calls = []

    def make():
        calls.append(1)
        return tf1.train.GradientDescentOptimizer(1.0)

    optimizer = v1.TowerOptimizer(make)
    assert not calls

    def _model_fn(features, labels, mode):
        return _scalar_model(features, labels, mode, optimizer=optimizer)

    spec = _towers(2, _model_fn)(tf.constant([1.0, 3.0]), None, "train")
    assert calls == [1]
    assert _train(spec, [{}], tf1.trainable_variables()) == [8.0]


def test_constants():
    optimizer = v1.TowerOptimizer(tf1.train.GradientDescentOptimizer(1.0))
    assert isinstance(optimizer, tf1.train.Optimizer)
    assert (
        v1.TowerOptimizer.COLLECTION_FOR_GRAPH_STATES
        == "replicate_model_fn_graph_states"
    )
    assert (optimizer.GATE_NONE, optimizer.GATE_OP, optimizer.GATE_GRAPH) == (
        0,
        1,
        2,
    )


def _unequal(first, second):
    counts = [first, second]

    def model_fn(features, labels, mode):
        index = int("tower_1" in tf1.get_default_graph().get_name_scope())
        return _scalar_model(features, labels, mode, calls=counts[index])

    return model_fn


def _not_wrapped(features, labels, mode):
    return _scalar_model(
        features,
        labels,
        mode,
        optimizer=tf1.train.GradientDescentOptimizer(1.0),
    )


def _in_cond(features, labels, mode):
    del labels
    w = tf1.get_variable("w", initializer=10.0)
    optimizer = v1.TowerOptimizer(tf1.train.GradientDescentOptimizer(1.0))

    def apply():
        optimizer.apply_gradients([(tf.ones([]), w)])
        return tf.constant(1)

    train = tf.cond(tf.constant(True), apply, lambda: tf.constant(0))
    return v1.EstimatorSpec(mode, loss=features[0], train_op=train)


def _other_metrics(features, labels, mode):
    del labels
    first = "tower_1" not in tf1.get_default_graph().get_name_scope()
    ops = {"m": tf1.metrics.mean(features)} if first else {}
    return v1.EstimatorSpec(mode, loss=features[0], eval_metric_ops=ops)


def _keras_metric(features, labels, mode):
    del labels
    return v1.EstimatorSpec(mode, eval_metric_ops={"m": features})


def _odd_export(features, labels, mode):
    del labels
    return v1.EstimatorSpec(
        mode, predictions=features, export_outputs={"x": features}
    )


def _nested(features, labels, mode):
    return _towers(2, _scalar_model)(features, labels, mode)


@pytest.mark.parametrize(
    "model_fn, mode, error, text",
    [
        (_unequal(3, 1), "train", ValueError, r"\[3, 1\] times"),
        (_unequal(2, 0), "train", ValueError, r"\[2, 0\] times"),
        (_unequal(1, 2), "train", ValueError, r"\[1, 2\] times"),
        (_not_wrapped, "train", ValueError, "Please wrap"),
        (_in_cond, "train", RuntimeError, "outside of it"),
        (_other_metrics, "eval", ValueError, "Expected the same"),
        (_keras_metric, "eval", TypeError, "update operation"),
        (_odd_export, "infer", ValueError, "Supported: PredictOutput"),
        (_scalar_model, "training", ValueError, "mode must be"),
        (_nested, "train", RuntimeError, "inside another"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_leave_nothing_behind(model_fn, mode, error, text):
    features = tf.constant([1.0, 3.0])
    with pytest.raises(error, match=text):
        _towers(2, model_fn)(features, None, mode)
    with tf1.variable_scope("again"):
        spec = _towers(2, _scalar_model)(features, None, "train")
    assert 8.0 in _train(spec, [{}], tf1.trainable_variables())


@pytest.mark.parametrize(
    "reduction, text",
    [(R.NONE, "none reduction is specified"), ("bogus", "must be one of")],
)
def test_bad_reductions(reduction, text):
    with pytest.raises(ValueError, match=text):
        v1.replicate_model_fn(_scalar_model, reduction)


def test_bad_batches():
    run = _towers(2, _scalar_model)
    for features in (
        tf.zeros([3]),
        tf.zeros([]),
        tf.SparseTensor([[0, 0]], [1.0], [3, 2]),
    ):
        with pytest.raises(
            ValueError, match="needs to be divisible|is a scalar"
        ):
            run(features, None, "train")


def test_bad_optimizers():
    for bad in (None, "sgd", 3):
        with pytest.raises(TypeError, match="must be one of"):
            v1.TowerOptimizer(bad)
    optimizer = v1.TowerOptimizer(lambda: None)
    with pytest.raises(TypeError, match="must be one of"):
        optimizer.get_name()


@pytest.mark.parametrize("function", [True, False])
@pytest.mark.parametrize("kind", ["v1", "keras"])
def test_eager_and_in_a_function(function, kind):
    with tf.__internal__.eager_context.eager_mode():
        w = tf.Variable(10.0)
        inner = {
            "v1": lambda: tf1.train.MomentumOptimizer(1.0, 0.5),
            "keras": lambda: keras.optimizers.SGD(1.0, momentum=0.5),
        }[kind]()
        optimizer = v1.TowerOptimizer(inner)
        step = tf.Variable(0)

        def model_fn(features, labels, mode):
            del labels
            train = optimizer.minimize(
                lambda: tf.reduce_mean(features) * w, step, [w]
            )
            return v1.EstimatorSpec(
                mode, loss=tf.reduce_mean(features), train_op=train or True
            )

        run = _towers(2, model_fn)

        def update(x):
            return run(x, None, "train").loss

        update = tf.function(update) if function else update
        for _ in range(2):
            loss = update(tf.constant([1.0, 3.0]))
        assert loss.numpy() == 2.0
        # Mean gradient 2: 10 - 2 - (1 + 2).
        assert w.numpy() == 5.0
        assert step.numpy() == 2
