"""Towers and AGN: other variables, kinds of gradients, orders of calls."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import versions

O = keras.optimizers  # noqa: E741


def _towers(inner=None, num_towers=2, **kwargs):
    return tf_xshard.TowerOptimizer(inner or O.SGD(1.0), num_towers, **kwargs)


def _agn(inner=None, period=2, **kwargs):
    return tf_xshard.AGNOptimizer(
        inner or O.SGD(1.0), communication_period=period, **kwargs
    )


def _dense(num_outputs=1, **kwargs):
    return keras.Sequential(
        [keras.layers.Input((2,)), keras.layers.Dense(num_outputs, **kwargs)]
    )


X, Y = np.ones((8, 2), "float32"), 5 * np.ones((8, 1), "float32")
with_both = pytest.mark.parametrize(
    "make", [_towers, _agn], ids=["tower", "agn"]
)


def _compiled(optimizer, model=None):
    model = model or _dense()
    # Traces would take most of the time.
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def _fit(optimizer, model=None, batch_size=4, y=Y):
    model = _compiled(optimizer, model)
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
    vector, optimizer = keras.Variable(np.zeros(4)), _towers()
    for gradient in gradients:
        optimizer.apply([gradient], [vector])
    assert vector.numpy().tolist() == want


def test_a_variable_that_the_last_call_does_not_have():
    a, b = keras.Variable(0.0), keras.Variable(0.0)
    optimizer = _towers()
    optimizer.build([a, b])
    optimizer.apply([tf.constant(1.0)] * 2, [a, b])
    optimizer.apply([tf.constant(1.0)], [a])
    assert (a.numpy(), b.numpy()) == (-1, -0.5)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@with_both
def test_functions_that_know_nothing_of_each_other_are_refused(make):
    """What the second adds would be left behind by the first's update."""
    a, b = keras.Variable(0.0, name="a"), keras.Variable(0.0, name="b")
    optimizer = make()
    optimizer.build([a, b])
    one = tf.constant(1.0)

    @tf.function(autograph=False)
    def first():
        optimizer.apply([one, None], [a, b])

    @tf.function(autograph=False)
    def second():
        optimizer.apply([None, one], [a, b])

    first()
    first()
    with pytest.raises(ValueError, match="'b' has a dense gradient in a tf.f"):
        second()
    assert (a.numpy(), b.numpy()) == (-1, 0)
    # One that handles both is no contradiction, once the first is gone.
    del first
    third = tf.function(lambda: optimizer.apply([one, one], [a, b]))
    third()
    third()
    assert b.numpy() < 0


@pytest.mark.parametrize(
    "setting, make", [("momentum", _towers), ("weight_decay", _agn)]
)
def test_frozen_layers_do_not_move(setting, make):
    layers = [keras.layers.Dense(2), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((2,)), *layers])
    _fit(make(O.SGD(0.05, **{setting: 0.5})), model)
    frozen, trained = layers
    frozen.trainable = False
    before = frozen.kernel.numpy(), trained.kernel.numpy()
    _fit(model.optimizer, model)
    np.testing.assert_array_equal(frozen.kernel, before[0])
    assert np.abs(trained.kernel.numpy() - before[1]).max() > 1e-3


@with_both
def test_variables_that_are_given_train(make):
    """In a loop of one's own, whatever their flag says."""
    variable = keras.Variable(0.0, trainable=False)
    optimizer = make()
    for _ in range(2):
        optimizer.apply([tf.constant(1.0)], [variable])
    assert variable.numpy() == -1
    optimizer.finalize_variable_values([variable])
    assert variable.numpy() == -1


def _restored(first, second, num_steps):
    a = keras.Variable(0.0)
    for _ in range(3):
        first.apply([tf.constant(1.0)], [a])
    b = keras.Variable(a.numpy())
    second.build([b])
    second.set_weights([v.numpy() for v in first.variables])
    for _ in range(num_steps):
        second.apply([tf.constant(1.0)], [b])
    return b.numpy()


def test_an_open_round_of_more_towers():
    """The mean of all that is there, at the next call."""
    optimizer = _towers()
    assert _restored(_towers(num_towers=5), optimizer, 1) == -1
    assert optimizer.iterations.numpy() == 1
    assert _restored(_towers(num_towers=5), _towers(), 3) == -2


def test_steps_of_a_longer_period():
    optimizer = _agn()
    _restored(_agn(period=5), optimizer, 1)
    assert optimizer.exchanges.numpy() == 1
    assert optimizer.center_variables[0].numpy() == -1


def test_means_of_float16_do_not_overflow():
    gradient = tf.constant(30000.0, tf.float16)
    towers, agn, at_once = (
        keras.Variable(0.0, dtype="float16") for _ in range(3)
    )
    for optimizer, variable in (
        (_towers(num_towers=4), towers),
        (_agn(period=4, local_optimizer=O.SGD(0.0)), agn),
    ):
        for _ in range(4):
            optimizer.apply([gradient], [variable])
        assert variable.numpy() == -30000
    _towers(num_towers=4).apply_towers([[gradient]] * 4, [at_once])
    assert at_once.numpy() == -30000


def test_loading_into_an_optimizer_that_is_not_built(tmp_path):
    """The weights alone, as with plain Keras, and a warning."""
    model, unbuilt = _fit(_towers()), _compiled(_towers())
    model.save_weights(tmp_path / "saved.weights.h5")
    with pytest.warns(UserWarning, match="call optimizer.build.model"):
        unbuilt.load_weights(tmp_path / "saved.weights.h5")
    for one, other in zip(
        model.get_weights(), unbuilt.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, other)


# What AGN's center must share with the model's variables.


def test_values_that_are_set_between_fits_count():
    model = _fit(_agn(O.SGD(0.01), 3), batch_size=2)
    model.set_weights([np.full_like(w, 50) for w in model.get_weights()])
    model.optimizer.learning_rate = 0.0
    model.optimizer.inner_optimizer.learning_rate = 0.0
    model.fit(X, Y, batch_size=2, verbose=0)
    for weight in model.get_weights():
        np.testing.assert_array_equal(weight, np.full_like(weight, 50))


def test_constraints_hold_for_the_center():
    model = _dense(kernel_constraint="non_neg")
    _fit(_agn(O.SGD(0.5)), model, batch_size=2, y=-2 * Y)
    assert (model.get_weights()[0] >= 0).all()


@versions.needs_multi_optimizer
def test_optimizers_by_path_reach_the_center():
    by_path = O.OptimizerMap(O.SGD(0.0), {"net/enc/.*": O.Adam(0.1)})
    model = keras.Sequential(
        [
            keras.layers.Input((2,)),
            keras.layers.Dense(2, name="enc"),
            keras.layers.Dense(1, name="head"),
        ],
        name="net",
    )
    before = model.get_weights()
    _fit(_agn(O.MultiOptimizer(by_path), 1), model)
    moved = [
        np.abs(a - b).max()
        for a, b in zip(model.get_weights(), before, strict=True)
    ]
    assert moved[0] > 0.01 and moved[2:] == [0, 0]


@pytest.mark.parametrize(
    "period, is_before, names",
    [
        (1, False, ["bias"]),
        (9, False, ["^bias$"]),
        (1, False, None),
        (9, False, None),
        (9, True, None),
    ],
)
def test_exclude_from_weight_decay(period, is_before, names):
    """Weights of layers have a path that is not their name.

    A period of 1 moves the center, a longer one the local variables.
    """
    layers = [
        keras.layers.Dense(1, bias_initializer="ones", name="bias"),
        keras.layers.Dense(1, bias_initializer="ones"),
    ]
    model = keras.Sequential([keras.layers.Input((1,)), *layers])
    biases = [layer.bias for layer in layers]
    for layer in layers:
        layer.kernel.assign([[1.0]])
    excluded = {"var_names": names} if names else {"var_list": biases}
    inner = O.SGD(1.0, weight_decay=0.1)
    if is_before:
        inner.exclude_from_weight_decay(**excluded)
    optimizer = _agn(inner, period)
    if not is_before:
        optimizer.exclude_from_weight_decay(**excluded)
    variables = model.trainable_variables
    optimizer.apply([tf.zeros(v.shape) for v in variables], variables)
    assert [float(bias[0]) for bias in biases] == [1, 1]
    for layer in layers:
        np.testing.assert_allclose(layer.kernel.numpy(), 0.9, rtol=1e-6)


def test_exclude_a_variable_whose_name_is_part_of_another():
    raw, weight = (keras.Variable(1.0, name=n) for n in ("raw", "w"))
    optimizer = _agn(O.SGD(1.0, weight_decay=0.1), 1)
    optimizer.exclude_from_weight_decay(var_list=[weight])
    optimizer.apply([tf.constant(0.0)] * 2, [raw, weight])
    np.testing.assert_allclose((raw.numpy(), weight.numpy()), (0.9, 1.0))


# AGN under a strategy, and around the end of fit.


def test_a_moving_average_of_the_center_reaches_all_replicas():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        inner = O.SGD(1.0, use_ema=True, ema_momentum=0.5)
        weight, optimizer = keras.Variable(10.0), _agn(inner, 1)
        optimizer.build([weight])
    gradients = lambda r: [tf.constant(r + 0.5)]
    step = replicas.applying(strategy, optimizer, gradients, [weight])
    step()
    step()
    optimizer.finalize_variable_values([weight])
    # The mean of 1 and 3 is subtracted twice. The average is of 8 and 6.
    for one in (weight, *optimizer.center_variables):
        np.testing.assert_allclose(replicas.values(strategy, one), [7.0] * 2)


def test_applied_outside_of_the_strategy():
    with replicas.mirrored(2).scope():
        weight = keras.Variable(10.0)
        optimizer = _agn()
    with pytest.raises(RuntimeError, match="outside of it, where there are no"):
        optimizer.apply([tf.constant(1.0)], [weight])
    assert weight.numpy() == 10


def _one_weight(strategy):
    """A weight of 10, its optimizer, and a step that subtracts 1 locally."""
    with strategy.scope():
        weight = keras.Variable(10.0)
        optimizer = _agn(period=4)
        optimizer.build([weight])

    @tf.function(autograph=False)
    def step():
        strategy.run(lambda: optimizer.apply([tf.constant(0.5)], [weight]))

    return weight, optimizer, step


@pytest.mark.parametrize(
    "kind", ["mirrored", pytest.param("tpu", marks=replicas.in_full)]
)
def test_training_goes_on_from_the_local_variables(kind):
    """Also where nobody has put them back."""
    strategy = replicas.STRATEGIES[kind](2)
    weight, optimizer, step = _one_weight(strategy)
    step()
    optimizer.show_center(True)
    assert [v.item() for v in replicas.values(strategy, weight)] == [10, 10]
    step()  # Keras' loss would be divided by 2; this is 1.0 a step.
    assert [v.item() for v in replicas.values(strategy, weight)] == [8, 8]
    optimizer.show_center(False)
    assert [v.item() for v in replicas.values(strategy, weight)] == [8, 8]
    assert optimizer.center_variables[0].numpy() == 10
    with pytest.raises(RuntimeError, match="show_center.* in replica context"):
        tf.function(strategy.run)(lambda: optimizer.show_center(True))


def test_the_end_of_many_fits_warns_of_no_retracing(monkeypatch):
    strategy = replicas.mirrored(2)
    weight, optimizer, step = _one_weight(strategy)
    logged = []
    monkeypatch.setattr(
        tf.get_logger(), "warning", lambda *args: logged.append(args)
    )
    for _ in range(6):
        step()
        optimizer.finalize_variable_values([weight])
    assert optimizer.exchanges.numpy() == 6
    assert not logged


def test_the_end_of_fit_right_after_a_restore():
    a = keras.Variable(0.0)
    first, second = _agn(), _agn()
    first.apply([tf.constant(1.0)], [a])
    b = keras.Variable(a.numpy())
    second.build([b])
    second.set_weights([v.numpy() for v in first.variables])
    second.finalize_variable_values([b])
    assert second.exchanges.numpy() == 1 and b.numpy() == -1


def test_an_inner_optimizer_that_is_built_or_can_not_be_copied():
    inner = O.Adam(0.1)
    inner.build([keras.Variable(0.0)])
    with pytest.raises(ValueError, match="has been built"):
        _agn(inner)
    with pytest.raises(ValueError, match="Pass a local_optimizer to AGNOptim"):
        _agn(O.SGD(lambda: 0.1))
    optimizer = _agn(O.SGD(lambda: 0.1), local_optimizer=O.SGD(0.1))
    assert int(optimizer.exchanges) == 0
