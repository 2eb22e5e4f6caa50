"""v1's TowerOptimizer and replicate_model_fn: oracles, splitting, pooling."""

import dataclasses
import types

import numpy as np
import pytest
import tensorflow as tf

from tests.compat.v1 import graphs
from tests.support import v1_oracle
from tf_xshard.compat import v1

tf1 = tf.compat.v1
R = tf1.losses.Reduction
NUM_STEPS = 3
FEATURES = np.float32([1.0, 3.0])
pytestmark = pytest.mark.usefixtures("graph")


def _towers(num, model_fn, reduction=R.MEAN):
    return v1.replicate_model_fn(model_fn, reduction, devices=["/CPU:0"] * num)


@pytest.mark.parametrize(
    "num_towers, name, reduction",
    [(4, "adagrad", R.MEAN), (2, "adam", R.SUM), (1, "sgd", R.MEAN)],
)
def test_oracle(num_towers, name, reduction):
    """Dense, sparse, mixed, partly missing and missing gradients."""
    oracle, make = v1_oracle.OPTIMIZERS[name]
    shapes = {"w": (3, 2), "e": (4, 2), "m": (4, 2), "p": (3, 2)}
    fetched = []

    def model_fn(features, mode):
        dense, indices, values = (features[k][0] for k in "div")
        w, e, m, p = (
            tf1.get_variable(key, shape, initializer=tf.ones)
            for key, shape in shapes.items()
        )
        tf1.get_variable("unused", initializer=1.0)
        loss = graphs.loss(dense, indices, values, w, e)
        # Sparse in some towers, dense in others.
        of_m = m if len(fetched) % 2 else 1 * m
        loss += tf.reduce_sum(values * tf.gather(of_m, indices))
        if not fetched:
            loss += tf.reduce_sum(dense * p)
        optimizer = v1.TowerOptimizer(make)
        # The original loses a generator's pairs.
        pairs = iter(optimizer.compute_gradients(loss))
        step = tf1.train.get_or_create_global_step()
        train = optimizer.apply_gradients(pairs, step)
        slots = [graphs.with_slots(optimizer, v) for v in (w, e, m, p)]
        fetched.append([slots, step])
        return v1.EstimatorSpec(
            mode, loss=loss, train_op=train, training_hooks=(len(fetched),)
        )

    steps = graphs.feeds(num_towers, NUM_STEPS)
    inputs = graphs.placeholders(num_towers)
    features = dict(zip("div", inputs, strict=True))
    spec = _towers(num_towers, model_fn, reduction)(features, None, "train")
    assert spec.training_hooks == (num_towers,)  # The last tower's spec.
    got = graphs.run_steps(spec.train_op, fetched[-1], inputs, steps)
    expected = [oracle(np.ones(shape)) for shape in shapes.values()]
    factor = 1 if reduction == R.SUM else 1 / num_towers
    for dense, indices, values in steps:
        rows = sum(map(v1_oracle.as_dense, indices, values))
        gradients = (sum(dense), rows, rows, dense[0])
        for one, gradient in zip(expected, gradients, strict=True):
            one.apply(factor * gradient)
    graphs.check_close(got, [[one.values() for one in expected], NUM_STEPS])


def _scaled(features, labels, mode):
    w = tf1.get_variable("w", initializer=2.0)
    y = tf.stack([features * w, -features], 1)
    return v1.EstimatorSpec(
        mode,
        predictions={"y": y, "x": features},
        loss=tf.reduce_mean((y[:, 0] - labels) ** 2),
        eval_metric_ops={
            "accuracy": tf1.metrics.accuracy(labels, features),
            "mean": tf1.metrics.mean(y),
        },
        export_outputs={
            "all": v1.PredictOutput({"y": y}),
            "class": v1.ClassificationOutput(y, tf.as_string(y)),
            "value": v1.RegressionOutput(features),
        },
    )


@pytest.mark.parametrize(
    "num_towers, reduction", [(1, R.MEAN), (4, R.MEAN), (4, R.SUM)]
)
def test_metrics_predictions_and_exports_are_of_all_towers(
    num_towers, reduction
):
    x = np.float32([1, 2, 3, 5, 8, 13, 21, 34])
    labels = np.float32([1, 2, 3, 5, 8, 0, 0, 34])
    data = tf.constant(x), tf.constant(labels)
    run = _towers(num_towers, _scaled, reduction)
    with tf1.variable_scope("", reuse=tf1.AUTO_REUSE):
        evaluated, predicted = (run(*data, mode) for mode in ("eval", "infer"))
    values, updates = zip(*evaluated.eval_metric_ops.values(), strict=True)
    exports = predicted.export_outputs
    assert isinstance(exports["class"], v1.ClassificationOutput)
    fetches = [values, evaluated.loss, predicted.predictions, exports]
    *got, exported = graphs.run_steps(updates, fetches)
    scores, classes = exported.pop("class")
    y = np.stack([2 * x, -x], 1)
    loss = np.mean((2 * x - labels) ** 2)
    loss *= num_towers if reduction == R.SUM else 1
    expected = [[6 / 8, y.mean()], loss, {"y": y, "x": x}]
    graphs.check_close(got, expected, 1e-6, 0)
    graphs.check_close(exported, {"all": [{"y": y}], "value": [x]})
    graphs.check_close([scores, classes.astype(np.float32)], [y, y])


def test_splitting_of_structures():
    seen = []

    def model_fn(features, labels, mode):
        assert features["a"][1][1] is None
        sparse = tf.sparse.to_dense(features["s"])
        seen.append([features["a"][0], labels, sparse])
        return v1.EstimatorSpec(mode, predictions=labels)

    a, labels = np.arange(8).reshape(4, 2), np.arange(4)
    sparse = np.array([[0, 5], [0, 0], [6, 0], [0, 7]])
    features = {
        "a": [tf.constant(a), (tf.range(4.0), None)],
        "s": tf.sparse.from_dense(sparse),
    }
    _towers(2, model_fn)(features, tf.constant(labels), "infer")
    with tf1.Session() as session:
        got = session.run(seen)
    expected = [[x[:2], x[2:]] for x in (a, labels, sparse)]
    graphs.check_close([*zip(*got, strict=True)], expected, 0, 0)


def test_several_optimizers_and_losses():
    def model_fn(features, mode):
        a = tf1.get_variable("a", initializer=10.0)
        b = tf1.get_variable("b", initializer=10.0)
        first = v1.TowerOptimizer(graphs.descent())
        second = v1.TowerOptimizer(tf1.train.MomentumOptimizer(2.0, 0.5))
        losses = [tf.reduce_mean(features) * a, tf.reduce_sum(features) * b]
        step = tf1.train.get_or_create_global_step()
        train = tf.group(
            first.minimize(losses[0], step, var_list=[a]),
            second.minimize(losses[1], var_list=[b]),
        )
        return v1.EstimatorSpec(mode, loss=tf.add_n(losses), train_op=train)

    spec = _towers(2, model_fn)(FEATURES, None, "train")
    fetches = [*tf1.trainable_variables(), tf1.train.get_global_step()]
    got = graphs.run_steps(spec.train_op, fetches, feeds=[(), ()])
    # Towers' gradients 1 and 3, mean 2; momentum 2, then 0.5 * 2 + 2.
    assert got == [10 - 2 - 2, 10 - 4 - 6, 2]


def test_devices_name_scopes_and_params():
    seen = []
    given = {"list": []}

    def model_fn(features, mode, params, config):
        w = tf1.get_variable("w", initializer=1.0)
        with tf.device("/CPU:3"):
            explicit = tf.identity(w)
        seen.append(tf1.get_default_graph().get_name_scope())
        seen.extend(x.device[-1:] for x in (w, features * w, explicit))
        params["list"].append(config)
        return v1.EstimatorSpec(mode, predictions=features * w)

    run = v1.replicate_model_fn(model_fn, devices=["/CPU:1", "/CPU:2"])
    with tf.name_scope("outer"):
        run(tf.zeros([2]), None, "infer", params=given)
    first, second = seen[:4], seen[4:]
    assert first == ["outer", "0", "1", "3"]
    assert second == ["outer/tower_1", "0", "2", "3"]
    assert given == {"list": []}


def _scalar_model(features, mode, *, calls=1):
    w = tf1.get_variable("w", initializer=10.0)
    loss = tf.reduce_mean(features) * w
    optimizer = v1.TowerOptimizer(graphs.descent())
    train = tf.group(*[optimizer.minimize(loss) for _ in range(calls)])
    return v1.EstimatorSpec(mode, loss=loss, train_op=train)


def _after_a_step(model_fn):
    spec = _towers(2, model_fn)(FEATURES, None, "train")
    return spec, graphs.run_steps(spec.train_op, tf1.trainable_variables())


def _as_dataclass(**fields):
    return dataclasses.make_dataclass("Spec", fields)(**fields)


@pytest.mark.parametrize("make", [types.SimpleNamespace, _as_dataclass])
def test_any_object_with_the_fields(make):
    spec, weights = _after_a_step(
        lambda features, mode: make(**_scalar_model(features, mode)._asdict())
    )
    assert not isinstance(spec, v1.EstimatorSpec)
    assert weights == [8.0]


def test_one_tower_and_none():
    """Everything goes to the wrapped optimizer, which a factory makes once."""
    made = []

    def once():
        made.append(tf1.train.MomentumOptimizer(1.0, 0.5, name="Mine"))
        return made[0]

    optimizer = v1.TowerOptimizer(once)
    assert not v1.TowerOptimizer.has_been_used()
    states = v1.TowerOptimizer.COLLECTION_FOR_GRAPH_STATES
    assert states == "replicate_model_fn_graph_states"
    assert optimizer.get_name() == "Mine"
    assert v1.TowerOptimizer.has_been_used()
    w = tf1.get_variable("w", initializer=10.0)
    step = tf1.train.get_or_create_global_step()
    train = optimizer.minimize(w * w, global_step=step, name="train")
    assert train.name == "train"
    assert optimizer.variables() == made[0].variables()
    assert len(made) == 1
    fetches = [step, *graphs.with_slots(optimizer, w)]
    assert graphs.run_steps(train, fetches) == [1, -10.0, 20.0]


def _is_first():
    return graphs.is_first("tower_1")


def _unequal(first, second):
    return lambda features, mode: _scalar_model(
        features, mode, calls=first if _is_first() else second
    )


def _in_cond(features, mode):
    w = tf1.get_variable("w", initializer=10.0)
    optimizer = v1.TowerOptimizer(graphs.descent())
    apply = lambda: optimizer.apply_gradients([(tf.ones([]), w)])
    train = tf.cond(tf.constant(True), apply, tf.no_op)
    return v1.EstimatorSpec(mode, loss=features[0], train_op=train)


def _other_metrics(features, mode):
    ops = {"m": tf1.metrics.mean(features)} if _is_first() else {}
    return v1.EstimatorSpec(mode, loss=features[0], eval_metric_ops=ops)


def _spec(**fields):
    return lambda features, mode: v1.EstimatorSpec(mode, **fields)


_odd_export = _spec(predictions=FEATURES, export_outputs={"x": 1})


def _nested(features, mode):
    return _towers(2, _scalar_model)(features, None, mode)


@pytest.mark.parametrize(
    "model_fn, mode, error, text",
    [
        (_unequal(3, 1), "train", ValueError, r"\[3, 1\] times"),
        (_unequal(1, 2), "train", ValueError, r"\[1, 2\] times"),
        (_spec(train_op="step"), "train", ValueError, "Please wrap"),
        (_in_cond, "train", RuntimeError, "top level of the model_fn"),
        (_other_metrics, "eval", ValueError, "Expected the same"),
        (_spec(eval_metric_ops={"m": 1}), "eval", TypeError, "update operat"),
        (_odd_export, "infer", ValueError, "Supported: PredictOutput"),
        (_scalar_model, "training", ValueError, "mode must be"),
        (_nested, "train", RuntimeError, "inside another"),
    ],
)
def test_refusals_leave_nothing_behind(model_fn, mode, error, text):
    # Towers that were wrapped vouch for no others.
    with tf1.variable_scope("before"):
        _towers(2, _scalar_model)(FEATURES, None, "train")
    assert not v1.TowerOptimizer.has_been_used()
    with pytest.raises(error, match=text):
        _towers(2, model_fn)(FEATURES, None, mode)
    with tf1.variable_scope("again"):
        _, weights = _after_a_step(_scalar_model)
    assert 8.0 in weights


def test_bad_arguments():
    sparse = tf.SparseTensor([[0, 0]], [1.0], [3, 2])
    for features, reduction, text in (
        (FEATURES, R.NONE, "none reduction is specified"),
        (FEATURES, "bogus", "must be one of"),
        (tf.zeros([3]), R.MEAN, "needs to be divisible"),
        (tf.zeros([]), R.MEAN, "is a scalar"),
        (sparse, R.MEAN, "needs to be divisible"),
    ):
        with pytest.raises(ValueError, match=text):
            _towers(2, _scalar_model, reduction)(features, None, "train")
    unmade = v1.TowerOptimizer(lambda: None)
    for call in (lambda: v1.TowerOptimizer("sgd"), unmade.get_name):
        with pytest.raises(TypeError, match="must be one of"):
            call()
