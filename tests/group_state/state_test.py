"""What each group holds: read, set, merged, compared, evaluated, exported."""

import functools
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

MEMBERS = group_training.GROUPS


@functools.cache
def _trained(kind, optimizer):
    model = group_training.trained(replicas.STRATEGIES[kind](4), optimizer)
    if optimizer == "momentum":
        x, y = group_training.data(16)
        model.evaluate(x, y, verbose=0)  # Makes the metrics.
    return model


@pytest.fixture
def model(request):
    """One trained model for all tests of a case, which leave it as it was."""
    case = getattr(request, "param", ("mirrored", "momentum"))
    model = _trained(*case)
    variables = group_training.variables(model)
    before = group_training.values(model)
    yield model
    for variable, values in zip(variables, before, strict=True):
        copies = model.distribute_strategy.experimental_local_results(
            variable.value
        )
        for copy, value in zip(copies, values, strict=True):
            copy.assign(value)


def _mean(model, variable, group):
    values = replicas.values(model.distribute_strategy, variable)
    members = [values[r] for r in MEMBERS[group]]
    return np.mean(np.float64(members), axis=0).astype(members[0].dtype)


def _is_statistic(variable):
    return "moving" in variable.path


def _variables(model):
    """Those that `fit` does not make anew, as it makes metrics."""
    metrics = {id(v) for v in model.metrics_variables}
    return [v for v in group_training.variables(model) if id(v) not in metrics]


def test_the_model_is_what_the_tests_need(model):
    """Groups differ; statistics differ by replica; else groups agree."""
    strategy = model.distribute_strategy
    for variable in _variables(model):
        r0, r1, r2, r3 = replicas.values(strategy, variable)
        assert np.array_equal(r0, r2) != _is_statistic(variable)
        assert np.array_equal(r1, r3) != _is_statistic(variable)
    kernel = replicas.values(strategy, model.layers[0].kernel)
    assert not np.array_equal(kernel[0], kernel[1])


@pytest.mark.parametrize("optimizer", group_training.OPTIMIZERS)
def test_every_variable_that_a_step_reads_is_in_the_state(optimizer):
    strategy = replicas.mirrored(2)
    model = group_training.compiled(strategy, optimizer, [[0], [1]])
    x, y = group_training.data(16)
    model.evaluate(x, y, batch_size=16, verbose=0)  # Makes the metrics.
    step = training.step_of(model).get_concrete_function(
        *next(iter(group_training.distributed(strategy)))
    )
    names = {
        copy.handle._id: one.name
        for one in tf_xshard.GroupState(model).variables()
        for copy in strategy.experimental_local_results(one.variable.value)
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
    assert state.num_groups == 2
    assert state.group_assignment.to_list() == MEMBERS
    for group, (first, _) in enumerate(MEMBERS):
        got = state.get_weights(group)
        assert list(got) == ["model", "optimizer"]
        for part, variables in (
            ("model", model.weights),
            ("optimizer", model.optimizer.variables),
        ):
            for variable, value in zip(variables, got[part], strict=True):
                strategy = model.distribute_strategy
                expected = replicas.values(strategy, variable)[first]
                if _is_statistic(variable):
                    expected = _mean(model, variable, group)
                assert value.dtype == expected.dtype
                np.testing.assert_array_equal(value, expected)


def test_set_weights_changes_one_group(model):
    state = tf_xshard.GroupState(model)
    before = group_training.values(model)
    weights = state.get_weights(1)
    new = {part: [v + 1 for v in values] for part, values in weights.items()}
    state.set_weights(1, new)
    learned = {id(v) for v in (*model.weights, *model.optimizer.variables)}
    for variable, was, now in zip(
        group_training.variables(model),
        before,
        group_training.values(model),
        strict=True,
    ):
        if any(variable is v for v in model.metrics_variables):
            continue
        for r in (0, 2):
            assert was[r].tobytes() == now[r].tobytes()
        np.testing.assert_array_equal(now[1], now[3])
        assert (id(variable) in learned) != np.array_equal(was[1], now[1])
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
    x, _ = group_training.data()
    no_model = tf_xshard.GroupState([model.layers[0].kernel])
    for call, text in (
        (lambda: state.get_weights(2), "group must be an int from 0 to 1"),
        (lambda: state.get_weights(True), "group must be an int"),
        (lambda: state.set_weights(-1, {}), "group must be an int"),
        (lambda: state.set_weights(0, {"modle": []}), "got .'modle'., but"),
        (
            lambda: state.set_weights(0, {"model": own[:-1]}),
            "has 8 variables, got 7 values",
        ),
        (
            lambda: state.set_weights(0, {"model": [np.zeros(9), *own[1:]]}),
            r"has shape \(4, 6\), got a value of shape \(9,\)",
        ),
        (lambda: state.merge("first"), "merge.. takes .mean."),
        (lambda: state.merge([1.0]), "needs 2 weights"),
        (lambda: state.merge([1.0, -1.0]), "needs 2 weights"),
        (lambda: state.merge([0.0, 0.0]), "needs 2 weights"),
        (
            lambda: state.assign(model.optimizer.learning_rate, [0.1]),
            "needs 2 values of shape",
        ),
        (lambda: state.export(0, "model.h5"), "writes .keras files"),
        (lambda: state.export(2, "model.keras"), "group must be an int"),
        (lambda: state.predict(x, 2), "group must be an int"),
        (lambda: no_model.export(0, "m.keras"), "without a keras.Model"),
        (lambda: no_model.predict(x), "without a keras.Model"),
        (lambda: no_model.evaluate(x), "without a keras.Model"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(TypeError, match="needs a variable, got float"):
        state.assign(0.1, [0.1, 0.2])
    with pytest.raises(TypeError, match="a generator can be read only once"):
        state.evaluate(x for x in ())
    group_training.assert_same(group_training.values(model), before)


def test_where_it_is_called(model):
    state = tf_xshard.GroupState(model)
    strategy = model.distribute_strategy
    read = lambda: state.get_weights(0)
    for step, text in (
        (read, "used inside a tf.function"),
        (lambda: strategy.run(read), "in replica context"),
    ):
        with pytest.raises(RuntimeError, match=text):
            tf.function(step, autograph=False)()


@pytest.mark.parametrize(
    "how, weights",
    [("mean", (0.5, 0.5)), (1, (0.0, 1.0)), ([1, 3], (0.25, 0.75))],
)
def test_merge(model, how, weights):
    expected = [
        sum(w * np.float64(_mean(model, v, g)) for g, w in enumerate(weights))
        for v in _variables(model)
    ]
    state = tf_xshard.GroupState(model)
    state.merge(how)
    for variable, value in zip(_variables(model), expected, strict=True):
        got = replicas.values(model.distribute_strategy, variable)
        for one in got[1:]:
            assert one.tobytes() == got[0].tobytes()
        np.testing.assert_allclose(got[0], value, rtol=1e-6)
    assert not any(
        value
        for row in state.divergence()
        for value in row.values()
        if isinstance(value, float)
    )


def test_divergence(model):
    strategy = model.distribute_strategy
    rows = {
        row["variable"]: row for row in tf_xshard.GroupState(model).divergence()
    }
    for variable in [*model.weights, *model.optimizer.variables]:
        row = rows[variable.path]
        values = np.float64(replicas.values(strategy, variable))
        within = max(np.ptp(values[m], axis=0).max() for m in MEMBERS)
        if _is_statistic(variable):
            assert row["statistic"] == within > 0
            assert row["within_group"] is row["between_groups"] is None
        else:
            assert row["within_group"] == within == 0
            assert row["between_groups"] == np.ptp(values, axis=0).max()
            assert row["statistic"] is row["local"] is None
    assert rows[model.layers[0].kernel.path]["between_groups"] > 0.01
    copy = strategy.experimental_local_results(model.layers[0].kernel.value)[3]
    copy.assign_add(tf.ones_like(copy) * 0.25)
    [row] = [
        row
        for row in tf_xshard.GroupState(model).divergence()
        if row["within_group"]
    ]
    assert row["variable"] == model.layers[0].kernel.path
    np.testing.assert_allclose(row["within_group"], 0.25, rtol=1e-6)
    text = str(tf_xshard.GroupState(model).divergence())
    assert text.startswith("variable") and "0.25" in text


@pytest.mark.parametrize(
    "model, ways",
    [
        (("mirrored", "agn_updates"), (False, True)),
        (("tpu", "agn"), (True, False)),
    ],
    indirect=["model"],
)
def test_agn_between_exchanges(model, ways):
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
    for shown in ways:
        model.optimizer.show_center(shown)
        before = group_training.values(model)
        rows = state.divergence()
        centers = [row for row in rows if row["kind"] == "center"]
        assert all(row["within_group"] == 0 for row in centers)
        assert any(row["between_groups"] > 1e-3 for row in centers)
        assert any(row["local"] for row in rows)
        for group, (first, _) in enumerate(MEMBERS):
            trainable = [
                value
                for value, variable in zip(
                    state.get_weights(group)["model"],
                    model.weights,
                    strict=True,
                )
                if variable.trainable
            ]
            for value, its in zip(trainable, center, strict=True):
                np.testing.assert_array_equal(value, its[first])
    x, _ = group_training.data()
    outputs = [state.predict(x, group, batch_size=32) for group in range(2)]
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3
    group_training.assert_same(group_training.values(model), before)
    new = [value + 1 for value in state.get_weights(1)["model"]]
    state.set_weights(1, {"model": new})
    group_training.assert_same([state.get_weights(1)["model"]], [new])
    state.merge()
    for values in group_training.values(model):
        for value in values[1:]:
            assert value.tobytes() == values[0].tobytes()


def _single(weights):
    """The same network on one device."""
    single = group_training.network()
    single.compile(loss="binary_crossentropy", metrics=["accuracy"])
    single.set_weights(weights)
    return single


@functools.cache
def _state(model):
    """One for all tests that evaluate: what it has traced stays."""
    return tf_xshard.GroupState(model)


@functools.cache
def _singles(model):
    weights = [_state(model).get_weights(group)["model"] for group in range(2)]
    return [_single(one) for one in weights]


MIRRORED, TPU = ("mirrored", "momentum"), ("tpu", "momentum")


@pytest.mark.parametrize(
    "model, form",
    [(MIRRORED, "dataset"), (MIRRORED, "weights"), (TPU, "arrays")],
    indirect=["model"],
)
def test_evaluate_equals_one_device(model, form):
    """Also on a last batch that replicas can't share evenly."""
    x, y = group_training.data(50)
    before = group_training.values(model)
    weights = np.linspace(0.0, 2.0, 50) if form == "weights" else np.ones(50)
    data = {
        "arrays": (x, y),
        "weights": ((x, y, weights.astype("float32")),),
        # Keras needs a first batch that replicas share evenly; none of
        # this seed's first orders begins with the last.
        "dataset": (
            tf.data.Dataset.from_tensor_slices((x, y))
            .batch(20)
            .shuffle(5, seed=0),
        ),
    }[form]
    table = _state(model).evaluate(
        *data, **{} if form == "dataset" else {"batch_size": 20}
    )
    assert table.column("group") == [0, 1, "ensemble"]
    outputs = []
    for row, single in zip(list(table)[:2], _singles(model), strict=True):
        expected = single.evaluate(
            x, y, 20, sample_weight=weights, verbose=0, return_dict=True
        )
        for name, value in expected.items():
            np.testing.assert_allclose(row[name], value, rtol=1e-5)
        outputs.append(single.predict(x, batch_size=20, verbose=0))
    ensemble = np.mean(outputs, axis=0)
    crossentropy = -np.log(np.where(y > 0, ensemble, 1 - ensemble)).ravel()
    np.testing.assert_allclose(
        table[2]["loss"], np.mean(crossentropy * weights), rtol=1e-5
    )
    np.testing.assert_allclose(
        table[2]["accuracy"], np.mean((ensemble > 0.5) == y), rtol=1e-5
    )
    group_training.assert_same(group_training.values(model), before)


@pytest.mark.parametrize("model", [MIRRORED, TPU], indirect=True)
def test_predict_equals_one_device(model):
    """A group, and the ensemble."""
    state, singles = _state(model), _singles(model)
    x, _ = group_training.data(50)
    before = group_training.values(model)
    # What plain Keras says mixes the groups.
    mixed = model.predict(x, batch_size=20, verbose=0)
    outputs = [s.predict(x, batch_size=20, verbose=0) for s in singles]
    for group, expected in enumerate(outputs):
        got = state.predict(x, group, batch_size=20)
        np.testing.assert_allclose(got, expected, atol=1e-6)
        assert np.abs(mixed - expected).max() > 0.01
    got = state.predict(x, batch_size=20)
    np.testing.assert_allclose(got, np.mean(outputs, axis=0), atol=1e-6)
    assert np.abs(outputs[0] - outputs[1]).max() > 0.01
    group_training.assert_same(group_training.values(model), before)


def test_evaluate_that_fails_leaves_the_model(model):
    before = group_training.values(model)

    def rows():
        x, y = group_training.data(16)
        yield x, y
        raise RuntimeError("no more")

    dataset = tf.data.Dataset.from_generator(
        rows,
        output_signature=(
            tf.TensorSpec((16, 4), tf.float32),
            tf.TensorSpec((16, 1), tf.float32),
        ),
    )
    with pytest.raises(Exception, match="no more"):
        tf_xshard.GroupState(model).evaluate(dataset)
    group_training.assert_same(group_training.values(model), before)


def test_the_ensembles_regularization_is_the_groups_mean():
    """Weights of 1 and of 3: losses of 4 and of 36. And activities."""
    with replicas.mirrored(2).scope():
        model = keras.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.Dense(
                    1,
                    kernel_regularizer=keras.regularizers.L2(1.0),
                    activity_regularizer=keras.regularizers.L2(0.5),
                ),
            ]
        )
        model.compile(
            optimizer=tf_xshard.CrossShardOptimizer(
                keras.optimizers.SGD(), group_assignment=[[0], [1]]
            ),
            loss="mse",
        )
    state = tf_xshard.GroupState(model)
    for group, value in enumerate([1.0, 3.0]):
        kernel = np.full((4, 1), value, "float32")
        state.set_weights(group, {"model": [kernel, [0.0]]})
    zeros = np.zeros([8, 4], "float32"), np.zeros([8, 1], "float32")
    assert state.evaluate(zeros).column("loss") == [4.0, 36.0, 20.0]
    ones = np.ones([8, 4], "float32"), np.zeros([8, 1], "float32")
    if versions.KERAS < (3, 14):
        return  # It does not divide activities by the number of rows.
    # Outputs of 4, 12 and 8; activities 0.5 * 16 and 0.5 * 144.
    losses = state.evaluate(ones).column("loss")
    np.testing.assert_allclose(
        losses, [16 + 4 + 8, 144 + 36 + 72, 64 + 20 + 40], rtol=1e-6
    )


class NoTrainingArgument(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3, "softmax")

    def call(self, x):
        return self.dense(x)


def test_metrics_of_all_kinds():
    """Vectors, and one that is called as the column of groups is."""

    def group(y_true, y_pred):
        return keras.ops.mean(y_pred, axis=-1)

    with replicas.mirrored(2).scope():
        model = NoTrainingArgument()
        model.compile(
            optimizer=tf_xshard.CrossShardOptimizer(
                keras.optimizers.SGD(), group_assignment=[[0], [1]]
            ),
            loss="categorical_crossentropy",
            metrics=[keras.metrics.F1Score(), group],
        )
        x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
        model(x)
    y = np.eye(3, dtype="float32")[np.arange(8) % 3]
    state = tf_xshard.GroupState(model)
    table = state.evaluate(x, y)
    assert table.column("group") == [0, 1, "ensemble"]
    assert table[0]["f1_score"].shape == (3,)
    np.testing.assert_allclose(table[0]["group (metric)"], 1 / 3, rtol=1e-5)
    assert "f1_score" in str(table)
    weight = np.linspace(0.1, 2.0, 8)
    [one, *_], [other, *_] = (
        state.evaluate((x, y), sample_weight=weight),
        state.evaluate((x, y, weight)),
    )
    assert one["loss"] == other["loss"] != table[0]["loss"]
    with pytest.raises(ValueError, match="and another"):
        state.evaluate((x, y, weight), sample_weight=weight)


def test_one_device():
    """No strategy: one group of one replica."""
    model = group_training.network()
    model.compile("adam", "binary_crossentropy")
    x, y = group_training.data(16)
    state = tf_xshard.GroupState(model)
    assert state.group_assignment.to_list() == [[0]]
    [row] = state.evaluate(x, y)
    np.testing.assert_allclose(
        row["loss"], model.evaluate(x, y, verbose=0), rtol=1e-6
    )
    own = state.get_weights(0)["model"]
    group_training.assert_same([own], [model.get_weights()])


@pytest.mark.parametrize(
    "model",
    [MIRRORED, ("mirrored", "towers"), ("tpu", "agn")],
    indirect=True,
)
def test_export(model, tmp_path):
    """An ordinary model, with the group's optimizer state, in plain Keras."""
    before = group_training.values(model)
    state = tf_xshard.GroupState(model)
    path = tmp_path / "group_1.keras"
    with model.distribute_strategy.scope():  # Where users are, often.
        state.export(1, path)
    with zipfile.ZipFile(path) as file:
        assert b"tf_xshard" not in file.read("config.json")
    loaded = keras.models.load_model(path)
    expected = state.get_weights(1)
    group_training.assert_same([loaded.get_weights()], [expected["model"]])
    slots = [v.numpy() for v in loaded.optimizer.variables]
    assert any(np.abs(value).max() > 0 for value in slots)
    x, y = group_training.data()
    if isinstance(model.optimizer, tf_xshard.CrossShardOptimizer):
        group_training.assert_same([slots], [expected["optimizer"]])
        np.testing.assert_allclose(
            loaded.predict(x, verbose=0),
            state.predict(x, 1, batch_size=32),
            atol=1e-6,
        )
    group_training.assert_same(group_training.values(model), before)
    loaded.fit(x, y, verbose=0)


def test_export_of_a_model_that_is_not_compiled(tmp_path):
    model = group_training.network()
    path = os.path.join(tmp_path, "model.keras")
    tf_xshard.GroupState(model).export(0, path)
    x, _ = group_training.data()
    np.testing.assert_array_equal(
        keras.models.load_model(path).predict(x, verbose=0),
        model.predict(x, verbose=0),
    )


def test_what_a_model_needs_to_be_evaluated_and_exported(tmp_path):
    class Own(keras.Model):
        def __init__(self, units, **kwargs):
            super().__init__(**kwargs)
            self.dense = keras.layers.Dense(units)

        def call(self, x):
            return self.dense(x)

    x = np.ones([2, 2])
    model = Own(1)
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


def test_what_model_save_can_do_export_can(tmp_path):
    """Lambda layers, losses of one's own, vocabularies, frozen layers."""

    def own_loss(y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 2, axis=-1)

    with replicas.mirrored(2).scope():
        lookup = keras.layers.IntegerLookup(output_mode="one_hot", max_tokens=6)
        lookup.adapt(np.array([10, 20, 30, 40, 50]))
        model = keras.Sequential(
            [
                keras.layers.Input((1,), dtype="int64"),
                lookup,
                keras.layers.Lambda(lambda t: t + t),
                keras.layers.Dense(3),
                keras.layers.Dense(1),
            ]
        )
        model.compile(
            optimizer=tf_xshard.CrossShardOptimizer(
                keras.optimizers.Adam(0.1), group_assignment=[[0], [1]]
            ),
            loss=own_loss,
        )
        model.optimizer.build(model.trainable_variables)
    state = tf_xshard.GroupState(model)
    weights = state.get_weights(1)["model"]
    state.set_weights(1, {"model": [value + 1 for value in weights]})
    model.layers[2].trainable = False
    compiled = model.optimizer
    path = tmp_path / "model.keras"
    state.export(1, path)
    assert model.optimizer is compiled
    loaded = keras.models.load_model(
        path, safe_mode=False, custom_objects={"own_loss": own_loss}
    )
    x = np.array([[10], [30], [99]])
    np.testing.assert_allclose(
        loaded.predict(x, verbose=0), state.predict(x, 1), atol=1e-6
    )


def test_each_group_has_its_learning_rate():
    """Four groups of one replica; SGD moves them by the rate."""
    strategy = replicas.mirrored(4)
    with strategy.scope():
        weight = keras.Variable(np.zeros(3, "float32"))
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0),
            group_assignment=[[0], [1], [2], [3]],
            loss_normalization="replica",
        )
        optimizer.build([weight])
    rates = [1.0, 2.0, 4.0, 8.0]
    state = tf_xshard.GroupState({"weight": weight, "optimizer": optimizer})
    state.assign(optimizer.learning_rate, rates)
    replicas.apply_once(strategy, optimizer, lambda r: [tf.ones([3])], [weight])
    for r, value in enumerate(replicas.values(strategy, weight)):
        np.testing.assert_array_equal(value, [-rates[r]] * 3)


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


def _in_and_outside(strategy):
    outside = keras.Variable(1.0)
    with strategy.scope():
        inside = keras.Variable(1.0)
    return inside, outside


def test_groups_can_not_differ_in_a_variable_with_one_copy(tmp_path):
    """It was created outside of the scope, and is written or refused."""
    strategy = replicas.mirrored(2)
    inside, outside = held = _in_and_outside(strategy)

    def values():
        return [[float(one) for one in replicas.values(strategy, inside)]] + [
            float(outside.numpy())
        ]

    state = tf_xshard.GroupState(held, [[0], [1]])
    shared = "created outside of the strategy's scope: all replicas share"
    with pytest.raises(ValueError, match=shared):
        state.set_weights(1, {"variables": [5.0, 5.0]})
    with pytest.raises(ValueError, match=shared):
        state.assign(outside, [2.0, 5.0])
    assert values() == [[1.0, 1.0], 1.0]
    # Equal values are written.
    state.set_weights(1, {"variables": [5.0, 1.0]})
    state.assign(outside, [2.0, 2.0])
    assert values() == [[1.0, 5.0], 2.0]
    state.set_weights(0, state.get_weights(0))
    state.merge([0.0, 1.0])
    assert values() == [[5.0, 5.0], 2.0]
    tf_xshard.GroupState(held).set_weights(0, {"variables": [6.0, 7.0]})
    assert values() == [[6.0, 6.0], 7.0]


@pytest.mark.parametrize("regroup", [None, {0: 1, 1: 0}])
def test_a_save_of_groups_is_not_restored_to_one_copy(regroup, tmp_path):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        saved = [keras.Variable(3.0), keras.Variable(4.0)]
    state = tf_xshard.GroupState(saved, [[0], [1]])
    state.assign(saved[1], [4.0, 5.0])
    state.save(tmp_path)
    inside, outside = _in_and_outside(strategy)
    restored = tf_xshard.GroupState([inside, outside], [[0], [1]])
    with pytest.raises(ValueError, match="groups can't have different values"):
        restored.restore(tmp_path, regroup=regroup)
    assert [float(v.numpy()) for v in (inside, outside)] == [1.0, 1.0]
    restored.restore(tmp_path, regroup="first")
    assert [float(v.numpy()) for v in (inside, outside)] == [3.0, 4.0]


def test_an_ensemble_after_the_optimizer_was_replaced():
    """By one with other groups: the metrics and weights are the same."""
    strategy = replicas.mirrored(4)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(1, use_bias=False)]
        )
        model.compile(
            tf_xshard.CrossShardOptimizer(keras.optimizers.SGD()), "mse"
        )
    state = tf_xshard.GroupState(model)
    x = np.ones([2, 2], "float32")
    for groups in ([[0], [1], [2], [3]], [[0, 1], [2, 3]]):
        with strategy.scope():
            model.optimizer = tf_xshard.CrossShardOptimizer(
                keras.optimizers.SGD(), group_assignment=groups
            )
        for r, copy in enumerate(
            strategy.experimental_local_results(model.weights[0].value)
        ):
            copy.assign(np.full([2, 1], r + 1.0))
        np.testing.assert_allclose(state.predict(x), [[5.0]] * 2, rtol=1e-6)
