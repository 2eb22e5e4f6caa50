"""Towers and AGN: other variables, kinds of gradients, orders of calls."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import traced
from tests.support import versions

O = keras.optimizers  # noqa: E741


def _towers(inner=None, num_towers=2):
    return tf_xshard.TowerOptimizer(inner or O.SGD(1.0), num_towers)


def _agn(inner=None, period=2, **kwargs):
    return tf_xshard.AGNOptimizer(
        inner or O.SGD(1.0), communication_period=period, **kwargs
    )


def _applied(optimizer, variable, *gradients):
    """The variable, after a call with each gradient."""
    for gradient in gradients:
        optimizer.apply([gradient], [variable])
    return variable


X, Y = np.ones((8, 2), "float32"), 5 * np.ones((8, 1), "float32")
ONE = tf.constant(1.0)
with_both = pytest.mark.parametrize(
    "make", [_towers, _agn], ids=["tower", "agn"]
)


def _compiled(optimizer, *layers):
    layers = layers or [keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((2,)), *layers], name="net")
    # Traces would take most of the time.
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def _fit(model, y=Y, batch_size=4):
    model.fit(X, y, batch_size=batch_size, verbose=0)
    return model


def _row(index):
    return tf.IndexedSlices(tf.ones([1]), [index], [4])


@pytest.mark.parametrize(
    "gradients, want",
    [
        ([_row(1), _row(2)], [0, -0.5, -0.5, 0]),
        ([_row(1), tf.ones([4])], [-0.5, -1, -0.5, -0.5]),
        ([tf.ones([4]), _row(1)], [-0.5, -1, -0.5, -0.5]),
    ],
    ids=["sparse", "then_dense", "dense_first"],
)
def test_sparse_gradients_of_a_vector(gradients, want):
    vector = _applied(_towers(), keras.Variable(np.zeros(4)), *gradients)
    assert vector.numpy().tolist() == want


def test_a_variable_that_the_last_call_does_not_have():
    a, b = keras.Variable(0.0), keras.Variable(0.0)
    optimizer = _towers()
    optimizer.apply([ONE, ONE], [a, b])
    optimizer.apply([ONE], [a])
    assert (a.numpy(), b.numpy()) == (-1, -0.5)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@with_both
def test_functions_that_know_nothing_of_each_other_are_refused(make):
    """What the second adds would be left behind by the first's update."""
    a, b = keras.Variable(0.0, name="a"), keras.Variable(0.0, name="b")
    optimizer = make()
    optimizer.build([a, b])
    first, second, third = (
        tf.function(lambda g=gradients: optimizer.apply(g, [a, b]))
        for gradients in ([ONE, None], [None, ONE], [ONE, ONE])
    )
    first()
    first()
    with pytest.raises(ValueError, match="'b' has a dense gradient in a tf.f"):
        second()
    assert (a.numpy(), b.numpy()) == (-1, 0)
    # One that handles both is no contradiction, once the first is gone.
    del first
    third()
    third()
    assert b.numpy() < 0


@pytest.mark.parametrize(
    "setting, make", [("momentum", _towers), ("weight_decay", _agn)]
)
def test_frozen_layers_do_not_move(setting, make):
    frozen, trained = keras.layers.Dense(2), keras.layers.Dense(1)
    optimizer = make(O.SGD(0.05, **{setting: 0.5}))
    _fit(_compiled(optimizer, frozen, trained))
    frozen.trainable = False
    before = frozen.kernel.numpy(), trained.kernel.numpy()
    _fit(_compiled(optimizer, frozen, trained))
    np.testing.assert_array_equal(frozen.kernel, before[0])
    assert np.abs(trained.kernel.numpy() - before[1]).max() > 1e-3


@with_both
def test_variables_that_are_given_train(make):
    """In a loop of one's own, whatever their flag says."""
    optimizer = make()
    variable = keras.Variable(0.0, trainable=False)
    assert _applied(optimizer, variable, ONE, ONE).numpy() == -1
    optimizer.finalize_variable_values([variable])
    assert variable.numpy() == -1


def _restored(first, second, num_steps):
    """A variable of `second`, which has what `first` had after some steps."""
    a = _applied(first, keras.Variable(0.0), *[ONE] * num_steps)
    b = keras.Variable(a.numpy())
    second.build([b])
    second.set_weights([v.numpy() for v in first.variables])
    return b


def test_an_open_round_of_more_towers():
    optimizer = _towers()
    b = _restored(_towers(num_towers=5), optimizer, 3)
    assert _applied(optimizer, b, ONE).numpy() == -1
    assert optimizer.iterations.numpy() == 1
    assert _applied(optimizer, b, ONE, ONE).numpy() == -2


def test_steps_of_a_longer_period():
    optimizer = _agn()
    _applied(optimizer, _restored(_agn(period=5), optimizer, 3), ONE)
    assert optimizer.exchanges.numpy() == 1
    assert optimizer.center_variables[0].numpy() == -1


def test_the_end_of_fit_right_after_a_restore():
    optimizer = _agn()
    b = _restored(_agn(), optimizer, 1)
    optimizer.finalize_variable_values([b])
    assert optimizer.exchanges.numpy() == 1 and b.numpy() == -1


def test_means_of_float16_do_not_overflow():
    gradients = [tf.constant(30000.0, tf.float16)] * 4
    for optimizer in (
        _towers(num_towers=4),
        _agn(period=4, local_optimizer=O.SGD(0.0)),
    ):
        variable = keras.Variable(0.0, dtype="float16")
        assert _applied(optimizer, variable, *gradients).numpy() == -30000
    at_once = keras.Variable(0.0, dtype="float16")
    _towers(num_towers=4).apply_towers([[g] for g in gradients], [at_once])
    assert at_once.numpy() == -30000


def test_loading_into_an_optimizer_that_is_not_built(tmp_path):
    """The weights alone, as with plain Keras, and a warning."""
    model, unbuilt = _fit(_compiled(_towers())), _compiled(_towers())
    model.save_weights(tmp_path / "saved.weights.h5")
    with pytest.warns(UserWarning, match="call optimizer.build.model"):
        unbuilt.load_weights(tmp_path / "saved.weights.h5")
    for one, other in zip(
        model.get_weights(), unbuilt.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, other)


# What AGN's center must share with the model's variables.


def test_values_that_are_set_between_fits_count():
    model = _fit(_compiled(_agn(O.SGD(0.01), 3)), batch_size=2)
    model.set_weights([np.full_like(w, 50) for w in model.get_weights()])
    model.optimizer.learning_rate = 0.0
    model.optimizer.inner_optimizer.learning_rate = 0.0
    _fit(model, batch_size=2)
    for weight in model.get_weights():
        np.testing.assert_array_equal(weight, np.full_like(weight, 50))


def test_constraints_hold_for_the_center():
    layer = keras.layers.Dense(1, kernel_constraint="non_neg")
    _fit(_compiled(_agn(O.SGD(0.5)), layer), y=-2 * Y, batch_size=2)
    assert (layer.kernel.numpy() >= 0).all()


@versions.needs_multi_optimizer
def test_optimizers_by_path_reach_the_center():
    by_path = O.OptimizerMap(O.SGD(0.0), {"net/enc/.*": O.Adam(0.1)})
    layers = [keras.layers.Dense(2, name="enc"), keras.layers.Dense(1)]
    model = _compiled(_agn(O.MultiOptimizer(by_path), 1), *layers)
    before = model.get_weights()
    _fit(model)
    moved = [
        np.abs(a - b).max()
        for a, b in zip(model.get_weights(), before, strict=True)
    ]
    assert moved[0] > 0.01 and moved[2:] == [0, 0]


@pytest.mark.parametrize(
    "period, is_before, excluded",
    [
        (1, False, {"var_names": ["bias"]}),
        (9, False, {"var_names": ["^bias$"]}),
        (9, True, None),
    ],
)
def test_exclude_from_weight_decay(period, is_before, excluded):
    """By names, which are no paths, or by a list.

    A period of 1 moves the center, a longer one the local variables.
    """
    layer = keras.layers.Dense(
        1, kernel_initializer="ones", bias_initializer="ones", name="bias"
    )
    layer.build((None, 1))
    excluded = excluded or {"var_list": [layer.bias]}
    inner = O.SGD(1.0, weight_decay=0.1)
    if is_before:
        inner.exclude_from_weight_decay(**excluded)
    optimizer = _agn(inner, period)
    if not is_before:
        optimizer.exclude_from_weight_decay(**excluded)
    variables = layer.trainable_variables
    optimizer.apply([tf.zeros(v.shape) for v in variables], variables)
    assert layer.bias.numpy().tolist() == [1]
    np.testing.assert_allclose(layer.kernel.numpy(), 0.9, rtol=1e-6)


def test_exclude_a_variable_whose_name_is_part_of_another():
    raw, weight = (keras.Variable(1.0, name=n) for n in ("raw", "w"))
    optimizer = _agn(O.SGD(1.0, weight_decay=0.1), 1)
    optimizer.exclude_from_weight_decay(var_list=[weight])
    optimizer.apply([tf.constant(0.0)] * 2, [raw, weight])
    np.testing.assert_allclose((raw.numpy(), weight.numpy()), (0.9, 1.0))


# AGN under a strategy.


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: inner,
        pytest.param(
            lambda inner: O.MultiOptimizer(O.OptimizerMap(inner)),
            marks=versions.needs_multi_optimizer,
        ),
    ],
    ids=["one", "multi"],
)
def test_a_moving_average_of_the_center_reaches_all_replicas(wrap):
    make = lambda: O.SGD(1.0, use_ema=True, ema_momentum=0.5)
    one = traced.Traced(lambda: _agn(wrap(make()), 1), [10.0], num_replicas=2)
    for _ in range(2):
        one.step([0.5, 1.5])
    one.optimizer.finalize_variable_values(one.weights)
    # The mean of 1 and 3 is subtracted twice. The average is of 8 and 6.
    for variable in (*one.weights, *one.optimizer.center_variables):
        values = replicas.values(one.strategy, variable)
        np.testing.assert_allclose(values, [7.0] * 2)


def test_the_ends_of_many_fits_trace_once(monkeypatch):
    """Whatever number of steps is pending; TensorFlow warns of no retracing."""
    one = traced.Traced(lambda: _agn(period=4), [10.0], num_replicas=2)
    logged, traces = [], []
    exchange = tf_xshard.AGNOptimizer._exchange
    expected = 10.0
    for fit in range(6):
        num_steps = 1 + fit % 2
        for _ in range(num_steps):
            one.step([0.25, 0.75])
        # Not in `step`: TensorFlow counts the traces of all tests' steps there.
        with monkeypatch.context() as patch:
            patch.setattr(
                tf.get_logger(), "warning", lambda *args: logged.append(args)
            )
            patch.setattr(
                tf_xshard.AGNOptimizer,
                "_exchange",
                lambda *args: traces.append(1) or exchange(*args),
            )
            one.optimizer.finalize_variable_values(one.weights)
        # Each early exchange applies the mean gradient of both replicas.
        expected -= 1.0
        np.testing.assert_allclose(one.values()[0], [expected] * 2)
    assert one.optimizer.exchanges.numpy() == 6
    assert len(traces) == 2  # One for each replica.
    assert not logged


class _Quarter(O.schedules.LearningRateSchedule):
    def __call__(self, step):
        return tf.constant(0.25)

    def get_config(self):
        return {}


@pytest.mark.parametrize(
    "name, value, expected",
    [
        # Two early exchanges, each of a mean gradient of 1: 10 - 1, and then
        ("clipnorm", 0.1, 8.9),
        ("learning_rate", _Quarter(), 8.75),
        ("learning_rate", 0.5, 8.5),
        ("weight_decay", 0.5, 3.5),
    ],
)
def test_the_end_of_fit_has_the_settings_of_now(name, value, expected):
    one = traced.Traced(lambda: _agn(period=4), [10.0], num_replicas=2)
    one.step([0.5, 0.5])
    one.optimizer.finalize_variable_values(one.weights)
    setattr(one.optimizer.inner_optimizer, name, value)
    one.step([0.5, 0.5])
    one.optimizer.finalize_variable_values(one.weights)
    np.testing.assert_allclose(one.values()[0], [expected] * 2, rtol=1e-6)


def test_an_inner_optimizer_that_is_built_or_can_not_be_copied():
    inner = O.Adam(0.1)
    inner.build([keras.Variable(0.0)])
    with pytest.raises(ValueError, match="has been built"):
        _agn(inner)
    with pytest.raises(ValueError, match="Pass a local_optimizer to AGNOptim"):
        _agn(O.SGD(lambda: 0.1))
    optimizer = _agn(O.SGD(lambda: 0.1), local_optimizer=O.SGD(0.1))
    assert int(optimizer.exchanges) == 0
