"""What each group holds: read, set, merged, compared, evaluated, exported."""

import os
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import group_training
from tests.support import replicas
from tests.support import training
from tests.support import versions
from tf_xshard.group_state import ensemble as ensemble_lib

MEMBERS = group_training.GROUPS
PAIR = [[0], [1]]
SGD = keras.optimizers.SGD


@pytest.fixture
def model(request):
    """A model whose groups differ."""
    kind, optimizer = getattr(request, "param", ("mirrored", "momentum"))
    return group_training.filled(replicas.STRATEGIES[kind](4), optimizer)


def _mean(model, variable, group):
    values = replicas.values(model.distribute_strategy, variable)
    members = [values[r] for r in MEMBERS[group]]
    return np.mean(np.float64(members), axis=0).astype(members[0].dtype)


def _learned(model):
    return [*model.weights, *model.optimizer.variables]


@pytest.mark.parametrize("optimizer", ["towers", "agn"])
def test_every_variable_that_a_step_reads_is_in_the_state(optimizer):
    """On one device, where there are the same variables."""
    model = group_training.compiled(
        tf.distribute.get_strategy(), optimizer, None
    )
    x, y = group_training.data(16)
    model.evaluate(x, y, batch_size=16, verbose=0)  # Makes the metrics.
    step = training.step_of(model).get_concrete_function(x, y)
    names = {
        one.variable.value.handle._id: one.name
        for one in tf_xshard.GroupState(model).variables()
    }
    read = {
        names.get(handle._id, str(handle))
        for handle in step.captured_inputs
        if handle.dtype == tf.resource
    }
    # Ordering tokens and the watchdog's counters hold no state of training.
    read = {name for name in read if "tf_xshard_" not in name}
    assert read <= set(names.values()), read - set(names.values())
    # LossScaleOptimizer's own counters, and rows that no table has.
    unread = set(names.values()) - read
    assert len(unread) <= len(model.trainable_variables) + 2, unread


def test_get_weights(model):
    state = tf_xshard.GroupState(model)
    # Groups have other weights, and replicas of a group other statistics.
    kernel, mean = (
        replicas.values(model.distribute_strategy, v)
        for v in (model.layers[0].kernel, model.layers[1].moving_mean)
    )
    assert not np.array_equal(kernel[0], kernel[1])
    assert not np.array_equal(mean[0], mean[2])
    for group in range(2):
        got = state.get_weights(group)
        assert list(got) == ["model", "optimizer"]
        group_training.assert_same(
            [got["model"] + got["optimizer"]],
            [[_mean(model, v, group) for v in _learned(model)]],
        )


def test_set_weights_changes_one_group(model):
    state = tf_xshard.GroupState(model)
    every = group_training.variables(model)
    before = group_training.values(model)
    weights = state.get_weights(1)
    new = {part: [v + 1 for v in values] for part, values in weights.items()}
    state.set_weights(1, new)
    learned = {id(v) for v in _learned(model)}
    for variable, was, now in zip(
        every, before, group_training.values(model), strict=True
    ):
        group_training.assert_same([now[::2]], [was[::2]])
        if id(variable) in learned:
            np.testing.assert_array_equal(now[1], now[3])
            assert not np.array_equal(was[1], now[1])
        else:
            group_training.assert_same([now], [was])
    # And one part alone.
    optimizer = state.get_weights(1)["optimizer"]
    group_training.assert_same([optimizer], [new["optimizer"]])
    zeros = [v * 0 for v in model.get_weights()]
    state.set_weights(1, {"model": zeros})
    got = state.get_weights(1)
    group_training.assert_same(got.values(), [zeros, optimizer])


def test_refusals_change_nothing(model):
    state = tf_xshard.GroupState(model)
    before = group_training.values(model)
    own = state.get_weights(0)["model"]
    few, wrong = {"model": own[:-1]}, {"model": [np.zeros(9), *own[1:]]}
    x, _ = group_training.data()
    rate = model.optimizer.learning_rate
    no_model = tf_xshard.GroupState([model.layers[0].kernel])
    strategy = model.distribute_strategy
    in_function = tf.function(lambda: state.get_weights(0), autograph=False)
    in_replica = tf.function(
        lambda: strategy.run(lambda: state.get_weights(0)), autograph=False
    )
    for call, error, text in (
        (lambda: state.get_weights(True), ValueError, "group must be an int"),
        (lambda: state.set_weights(-1, {}), ValueError, "must be an int"),
        (lambda: state.set_weights(0, {"m": []}), ValueError, "'m'., but"),
        (lambda: state.set_weights(0, few), ValueError, "8 variables, got 7"),
        (lambda: state.set_weights(0, wrong), ValueError, "shape .4, 6., got"),
        (lambda: state.merge("first"), ValueError, "merge.. takes .mean."),
        (lambda: state.merge([1.0]), ValueError, "needs 2 weights"),
        (lambda: state.merge([1.0, -1.0]), ValueError, "needs 2 weights"),
        (lambda: state.merge([0.0, 0.0]), ValueError, "needs 2 weights"),
        (lambda: state.assign(rate, [0.1]), ValueError, "needs 2 values of"),
        (lambda: state.assign(0.1, [0.1, 0.2]), TypeError, "got float"),
        (lambda: state.export(0, "m.h5"), ValueError, "writes .keras files"),
        (lambda: state.export(2, "m.keras"), ValueError, "must be an int"),
        (lambda: state.predict(x, 2), ValueError, "group must be an int"),
        (lambda: state.evaluate(i for i in ()), TypeError, "a generator can"),
        (lambda: no_model.export(0, "m.keras"), ValueError, "without a keras"),
        (lambda: no_model.predict(x), ValueError, "without a keras.Model"),
        (lambda: no_model.evaluate(x), ValueError, "without a keras.Model"),
        (in_function, RuntimeError, "used inside a tf.function"),
        (in_replica, RuntimeError, "in replica context"),
    ):
        with pytest.raises(error, match=text):
            call()
    group_training.assert_same(group_training.values(model), before)


@pytest.mark.parametrize(
    "how, weights",
    [("mean", (0.5, 0.5)), (1, (0.0, 1.0)), ([1, 3], (0.25, 0.75))],
)
def test_merge(model, how, weights):
    expected = [
        sum(w * np.float64(_mean(model, v, g)) for g, w in enumerate(weights))
        for v in _learned(model)
    ]
    tf_xshard.GroupState(model).merge(how)
    for variable, value in zip(_learned(model), expected, strict=True):
        got = replicas.values(model.distribute_strategy, variable)
        group_training.assert_same([got], [got[:1] * 4])
        np.testing.assert_allclose(got[0], value, rtol=1e-6)


def test_divergence(model):
    strategy = model.distribute_strategy
    divergence = tf_xshard.GroupState(model).divergence
    rows = {row["variable"]: row for row in divergence()}
    for variable in _learned(model):
        row = rows[variable.path]
        values = np.float64(replicas.values(strategy, variable))
        within = max(np.ptp(values[m], axis=0).max() for m in MEMBERS)
        if "moving" in variable.path:
            assert row["statistic"] == within > 0
            assert row["within_group"] is row["between_groups"] is None
        else:
            assert row["within_group"] == within == 0
            assert row["between_groups"] == np.ptp(values, axis=0).max()
            assert row["statistic"] is row["local"] is None
    assert rows[model.layers[0].kernel.path]["between_groups"] > 0.01
    copy = strategy.experimental_local_results(model.layers[0].kernel.value)[3]
    copy.assign_add(tf.ones_like(copy) * 0.25)
    table = divergence()
    [row] = [row for row in table if row["within_group"]]
    assert row["variable"] == model.layers[0].kernel.path
    np.testing.assert_allclose(row["within_group"], 0.25, rtol=1e-6)
    assert str(table).startswith("variable") and "0.25" in str(table)


@pytest.mark.parametrize(
    "model", [("mirrored", "agn"), ("tpu", "agn")], indirect=True
)
def test_agn_between_exchanges(model):
    """The group's weights are the center; what is local has its column.

    Whether the center is shown or not.
    """
    strategy = model.distribute_strategy
    center = [
        replicas.values(strategy, v) for v in model.optimizer.center_variables
    ]
    local = replicas.values(strategy, model.trainable_variables[0])
    assert not np.array_equal(local[0], local[2])
    assert not np.array_equal(local[0], center[0][0])
    state = tf_xshard.GroupState(model)
    for shown in (False, True):
        model.optimizer.show_center(shown)
        before = group_training.values(model)
        rows = state.divergence()
        centers = [row for row in rows if row["kind"] == "center"]
        assert {row["within_group"] for row in centers} == {0}
        assert max(row["between_groups"] for row in centers) > 1e-3
        assert any(row["local"] for row in rows)
        for group, (first, _) in enumerate(MEMBERS):
            got = state.get_weights(group)["model"]
            # The statistics are neither trained nor in the center.
            del got[4:6]
            group_training.assert_same([got], [[of[first] for of in center]])
    group_training.assert_same(group_training.values(model), before)
    new = [value + 1 for value in state.get_weights(1)["model"]]
    state.set_weights(1, {"model": new})
    group_training.assert_same([state.get_weights(1)["model"]], [new])
    state.merge()
    merged = group_training.values(model)
    group_training.assert_same(merged, [values[:1] * 4 for values in merged])


def test_evaluate_that_fails_leaves_the_model(model, monkeypatch):
    before = group_training.values(model)

    def evaluate(*args, **kwargs):
        kernel = replicas.values(
            model.distribute_strategy, model.layers[0].kernel
        )
        assert np.array_equal(kernel[1], kernel[0])
        raise RuntimeError("no more")

    monkeypatch.setattr(model, "evaluate", evaluate)
    with pytest.raises(RuntimeError, match="no more"):
        tf_xshard.GroupState(model).evaluate(np.ones([4, 4]))
    group_training.assert_same(group_training.values(model), before)


def test_the_ensembles_regularization_is_the_groups_mean():
    """Weights of 1 and of 3: losses of 4 and of 36. And activities."""
    layer = keras.layers.Dense(
        1,
        kernel_regularizer=keras.regularizers.L2(1.0),
        activity_regularizer=keras.regularizers.L2(0.5),
    )
    model = keras.Sequential([keras.layers.Input((4,)), layer])
    model.compile(SGD(), loss="mse")
    ensemble = ensemble_lib.Ensemble(model, 2)
    ensemble.show([[np.full((4, 1), v), np.zeros(1)] for v in (1.0, 3.0)])
    zeros = np.zeros([8, 4], "float32"), np.zeros([8, 1], "float32")
    assert ensemble.evaluate(*zeros, verbose=0) == 20.0
    ones = np.ones([8, 4], "float32"), np.zeros([8, 1], "float32")
    # Before Keras 3.14, activities are not divided by the number of rows.
    if versions.KERAS >= (3, 14):
        # Outputs of 4, 12 and 8; activities 0.5 * 16 and 0.5 * 144.
        loss = ensemble.evaluate(*ones, verbose=0)
        assert loss == pytest.approx(64 + 20 + 40)
    # It is made again for other groups, variables or metrics.
    assert ensemble.is_of(model, 2) and not ensemble.is_of(model, 4)
    model.compile(SGD(), loss="mse", metrics=["mae"])
    assert not ensemble.is_of(model, 2)


class Own(keras.Model):
    """Has no `get_config`, and takes no `training`."""

    def __init__(self, layer):
        super().__init__()
        self.dense = layer

    def call(self, x):
        return self.dense(x)


def test_metrics_of_all_kinds_on_one_device():
    """Vectors, and one that is called as the column of groups is."""

    def group(y_true, y_pred):
        return keras.ops.mean(y_pred, axis=-1)

    model = Own(keras.layers.Dense(3, "softmax"))
    model.compile(
        tf_xshard.CrossShardOptimizer(SGD()),
        loss="categorical_crossentropy",
        metrics=[keras.metrics.F1Score(), group],
    )
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    model(x)
    y = np.eye(3, dtype="float32")[np.arange(8) % 3]
    state = tf_xshard.GroupState(model)
    [row] = table = state.evaluate(x, y)
    assert row["group"] == 0 and row["f1_score"].shape == (3,)
    np.testing.assert_allclose(row["group (metric)"], 1 / 3, rtol=1e-5)
    assert "f1_score" in str(table)
    loss, *_ = model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(row["loss"], loss, rtol=1e-6)
    weight = np.linspace(0.1, 2.0, 8)
    [one] = state.evaluate((x, y), sample_weight=weight)
    [other] = state.evaluate((x, y, weight))
    assert one["loss"] == other["loss"] != row["loss"]
    with pytest.raises(ValueError, match="and another"):
        state.evaluate((x, y, weight), sample_weight=weight)


@pytest.mark.parametrize("how", ["momentum", "frozen", "towers", "agn"])
def test_export(how, tmp_path):
    """An ordinary model, with the group's optimizer state, in plain Keras."""
    strategy = replicas.mirrored(2)
    optimizer = "momentum" if how == "frozen" else how
    model = group_training.compiled(strategy, optimizer, PAIR)
    # Once its optimizer is built, which has slots of this layer.
    model.layers[0].trainable = how != "frozen"
    state = tf_xshard.GroupState(model)
    for index, one in enumerate(state.variables(("weight", "slot", "center"))):
        if one.numpy_type == np.float32:
            values = [np.full(one.shape, 0.1 * index + g) for g in (1, 2)]
            state.assign(one.variable, values)
    before, compiled = group_training.values(model), model.optimizer
    path = tmp_path / "group_1.keras"
    with strategy.scope():  # Where users are, often.
        state.export(1, path)
    with zipfile.ZipFile(path) as file:
        assert b"tf_xshard" not in file.read("config.json")
    loaded = keras.models.load_model(path)
    expected = state.get_weights(1)
    group_training.assert_same([loaded.get_weights()], [expected["model"]])
    if optimizer == "momentum":
        found = [v.numpy() for v in loaded.optimizer.variables]
        slots = expected["optimizer"]
        if how == "frozen":
            del slots[2:4]
        group_training.assert_same([found], [slots])
        assert np.max(found[-1]) > 2
    x, _ = group_training.data(16)
    np.testing.assert_allclose(
        loaded(x), group_training.outputs(expected["model"], x), atol=1e-6
    )
    assert model.optimizer is compiled
    group_training.assert_same(group_training.values(model), before)


def test_what_a_model_needs_to_be_evaluated_and_exported(tmp_path):
    x = np.ones([2, 4], "float32")
    model = Own(keras.layers.Dense(1))
    model(x)
    state = tf_xshard.GroupState(model)
    with pytest.raises(ValueError, match="must call `compile"):
        state.evaluate(x, x[:, :1])
    path = tmp_path / "model.keras"
    path.write_text("an earlier one")
    with pytest.raises(NotImplementedError, match="get_config"):
        state.export(0, path)
    assert path.read_text() == "an earlier one"
    assert os.listdir(tmp_path) == ["model.keras"]
    # A model that is not compiled.
    model = group_training.network()
    tf_xshard.GroupState(model).export(0, path)
    np.testing.assert_array_equal(keras.models.load_model(path)(x), model(x))


def test_each_group_has_its_learning_rate():
    """Four groups of one replica; SGD moves them by the rate."""
    strategy = replicas.mirrored(4)
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = tf_xshard.CrossShardOptimizer(
            SGD(1.0), "sum", [[0], [1], [2], [3]], loss_normalization="replica"
        )
        optimizer.build([weight])
    rates = [1.0, 2.0, 4.0, 8.0]
    state = tf_xshard.GroupState({"weight": weight, "optimizer": optimizer})
    state.assign(optimizer.learning_rate, rates)
    replicas.apply_once(strategy, optimizer, lambda r: [tf.ones([])], [weight])
    assert replicas.values(strategy, weight) == [-rate for rate in rates]


def test_values_that_do_not_fit_change_nothing():
    one, two, count = keras.Variable(1.0), keras.Variable(2.0), tf.Variable(3)
    state = tf_xshard.GroupState([one, two, count])
    for wrong in ([7, None, 3], [7, "x", 3], [7, 1j, 3], [7, 2, 1.5]):
        with pytest.raises(ValueError, match="has dtype (float|int)32, got"):
            state.set_weights(0, {"variables": wrong})
    with pytest.raises(ValueError, match="has dtype float32, got"):
        state.assign(one, ["fast"])
    assert [float(v.numpy()) for v in (one, two, count)] == [1.0, 2.0, 3.0]
    state.set_weights(0, {"variables": [5, np.float64(6), np.int64(7)]})
    assert [float(v.numpy()) for v in (one, two, count)] == [5.0, 6.0, 7.0]


def test_groups_can_not_differ_in_a_variable_with_one_copy(tmp_path):
    """It was created outside of the scope, and is written or refused."""
    strategy, outside = replicas.mirrored(2), keras.Variable(1.0)
    with strategy.scope():
        inside = keras.Variable(1.0)
        saved = [keras.Variable(3.0), keras.Variable(4.0)]

    def values():
        return replicas.values(strategy, inside), float(outside.numpy())

    state = tf_xshard.GroupState([inside, outside], PAIR)
    shared = "created outside of the strategy's scope: all replicas share"
    with pytest.raises(ValueError, match=shared):
        state.set_weights(1, {"variables": [5.0, 5.0]})
    with pytest.raises(ValueError, match=shared):
        state.assign(outside, [2.0, 5.0])
    assert values() == ([1.0, 1.0], 1.0)
    # Equal values are written.
    state.set_weights(1, {"variables": [5.0, 1.0]})
    state.assign(outside, [2.0, 2.0])
    assert values() == ([1.0, 5.0], 2.0)
    state.set_weights(0, state.get_weights(0))
    state.merge([0.0, 1.0])
    assert values() == ([5.0, 5.0], 2.0)
    # Nor are groups' values restored to it.
    other = tf_xshard.GroupState(saved, PAIR)
    other.assign(saved[1], [4.0, 5.0])
    other.save(tmp_path)
    for regroup in (None, {0: 1, 1: 0}):
        with pytest.raises(ValueError, match="groups can't have different"):
            state.restore(tmp_path, regroup=regroup)
    assert values() == ([5.0, 5.0], 2.0)
    state.restore(tmp_path, regroup="first")
    assert values() == ([3.0, 3.0], 4.0)
