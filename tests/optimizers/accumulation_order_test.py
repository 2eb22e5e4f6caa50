"""Towers and AGN: other variables, kinds of gradients, orders of calls."""

import os

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


def _rows(indices, num_rows, value=1.0):
    return tf.IndexedSlices(
        tf.fill([len(indices)], value),
        tf.constant(indices),
        tf.constant([num_rows]),
    )


def _dense(num_outputs=1, **kwargs):
    return keras.Sequential(
        [keras.layers.Input((2,)), keras.layers.Dense(num_outputs, **kwargs)]
    )


X, Y = np.ones((8, 2), "float32"), 5 * np.ones((8, 1), "float32")


def test_sparse_gradients_of_vectors_and_tables():
    bias, table = keras.Variable(np.zeros(4)), keras.Variable(np.zeros((4, 2)))
    optimizer = _towers()
    for row in (1, 2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(bias.value, [row])) + tf.reduce_sum(
                tf.gather(table.value, [row])
            )
        gradients = tape.gradient(loss, [bias.value, table.value])
        assert all(isinstance(g, tf.IndexedSlices) for g in gradients)
        optimizer.apply(gradients, [bias, table])
    assert bias.numpy().tolist() == [0, -0.5, -0.5, 0]
    assert table.numpy()[:, 0].tolist() == [0, -0.5, -0.5, 0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_dense_and_sparse_in_one_round(order):
    vector = keras.Variable(np.zeros(4))
    optimizer = _towers()
    gradients = [tf.ones([4]), _rows([1], 4)]
    for index in order:
        optimizer.apply([gradients[index]], [vector])
    assert vector.numpy().tolist() == [-0.5, -1, -0.5, -0.5]


def test_a_variable_that_the_last_call_does_not_have():
    a, b = keras.Variable(0.0), keras.Variable(0.0)
    optimizer = _towers()
    optimizer.build([a, b])
    optimizer.apply([tf.constant(1.0)] * 2, [a, b])
    optimizer.apply([tf.constant(1.0)], [a])
    assert (a.numpy(), b.numpy()) == (-1, -0.5)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("make", [_towers, _agn], ids=["tower", "agn"])
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
    "wanted, make",
    [
        ("momentum", _towers),
        ("weight_decay", _agn),
        ("momentum", _agn),
        ("weight_decay", _towers),
    ],
)
def test_frozen_layers_do_not_move(wanted, make):
    inner = O.SGD(0.05, **{wanted: 0.5})
    model = keras.Sequential(
        [
            keras.layers.Input((2,)),
            keras.layers.Dense(2),
            keras.layers.Dense(1),
        ]
    )
    model.compile(make(inner), "mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    frozen, trained = model.layers
    frozen.trainable = False
    model.compile(model.optimizer, "mse")
    before = frozen.kernel.numpy(), trained.kernel.numpy()
    model.fit(X, Y, batch_size=4, verbose=0)
    np.testing.assert_array_equal(frozen.kernel, before[0])
    assert np.abs(trained.kernel.numpy() - before[1]).max() > 1e-3


@pytest.mark.parametrize("make", [_towers, _agn], ids=["tower", "agn"])
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: _towers(num_towers=4),
        lambda: _agn(period=4, local_optimizer=O.SGD(0.0)),
    ],
    ids=["tower", "agn"],
)
def test_means_of_float16_do_not_overflow(make):
    variable = keras.Variable(0.0, dtype="float16")
    optimizer = make()
    for _ in range(4):
        optimizer.apply([tf.constant(30000.0, tf.float16)], [variable])
    assert variable.numpy() == -30000


def test_apply_towers_of_float16_does_not_overflow():
    variable = keras.Variable(0.0, dtype="float16")
    _towers(num_towers=4).apply_towers(
        [[tf.constant(30000.0, tf.float16)]] * 4, [variable]
    )
    assert variable.numpy() == -30000


@pytest.mark.parametrize(
    "make",
    [lambda: _towers(O.Adam(0.1)), lambda: _agn(O.Adam(0.1))],
    ids=["tower", "agn"],
)
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_legacy_h5_and_set_weights_before_building(make, tmp_path):
    model = _dense()
    model.compile(make(), keras.losses.MeanSquaredError())
    model.fit(X, Y, batch_size=2, verbose=0)  # Four steps.
    model.train_on_batch(X, Y)
    model.optimizer.build(model.trainable_variables)
    path = os.path.join(tmp_path, "model.h5")
    model.save(path)
    restored = keras.models.load_model(path)
    restored.optimizer.build(restored.trainable_variables)
    for mine, theirs in zip(
        model.optimizer.variables, restored.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(mine, theirs, err_msg=mine.path)
    for one in (model, restored):
        one.train_on_batch(X, Y)
    np.testing.assert_array_equal(
        model.get_weights()[0], restored.get_weights()[0]
    )


@pytest.mark.parametrize("make", [_towers, _agn], ids=["tower", "agn"])
def test_files_of_another_time(make, tmp_path):
    """Unbuilt and built, as with plain Keras: a warning, and the weights."""
    path = os.path.join(tmp_path, "saved.weights.h5")
    model = _dense()
    model.compile(make(), "mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    model.save_weights(path)
    other = _dense()
    other.compile(make(), "mse")
    with pytest.warns(UserWarning) as warned:
        other.load_weights(path)
    assert [w for w in warned if "call optimizer.build(model" in str(w.message)]
    np.testing.assert_array_equal(
        model.get_weights()[0], other.get_weights()[0]
    )


# What AGN's center must share with the model's variables.


def test_values_that_are_set_between_fits_count():
    model = _dense()
    model.compile(_agn(O.SGD(0.01), 3), "mse")
    model.fit(X, Y, batch_size=2, verbose=0)
    model.set_weights([np.full_like(w, 50) for w in model.get_weights()])
    model.optimizer.learning_rate = 0.0
    model.optimizer.inner_optimizer.learning_rate = 0.0
    model.fit(X, Y, batch_size=2, verbose=0)
    for weight in model.get_weights():
        np.testing.assert_array_equal(weight, np.full_like(weight, 50))


def test_constraints_hold_for_the_center():
    model = _dense(kernel_constraint="non_neg")
    model.compile(_agn(O.SGD(0.5)), "mse")
    model.fit(X, -2 * Y, batch_size=2, verbose=0)
    assert (model.get_weights()[0] >= 0).all()


@versions.needs_multi_optimizer
def test_optimizers_by_path_reach_the_center(tmp_path):
    def make():
        by_path = O.OptimizerMap(O.SGD(0.0))
        by_path["net/enc/.*"] = O.Adam(0.1)
        return _agn(O.MultiOptimizer(by_path), 1)

    model = keras.Sequential(
        [
            keras.layers.Input((2,)),
            keras.layers.Dense(2, name="enc"),
            keras.layers.Dense(1, name="head"),
        ],
        name="net",
    )
    before = model.get_weights()
    model.compile(make(), "mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    moved = [
        np.abs(a - b).max()
        for a, b in zip(model.get_weights(), before, strict=True)
    ]
    assert moved[0] > 0.01 and moved[2:] == [0, 0]
    path = tf.train.Checkpoint(o=model.optimizer).write(
        os.path.join(tmp_path, "checkpoint")
    )
    other = make()
    other.build(model.trainable_variables)
    tf.train.Checkpoint(o=other).read(path).assert_consumed()
    for mine, theirs in zip(
        model.optimizer.variables, other.variables, strict=True
    ):
        np.testing.assert_array_equal(mine, theirs, err_msg=mine.path)


@pytest.mark.parametrize("how", ["names", "list", "anchored", "before"])
@pytest.mark.parametrize("period", [1, 9], ids=["center", "local"])
def test_exclude_from_weight_decay(how, period):
    """Weights of layers have a path that is not their name."""
    model = keras.Sequential(
        [
            keras.layers.Input((1,)),
            keras.layers.Dense(1, bias_initializer="ones", name="bias"),
            keras.layers.Dense(1, bias_initializer="ones"),
        ]
    )
    biases = [layer.bias for layer in model.layers]
    kernels = [layer.kernel for layer in model.layers]
    for kernel in kernels:
        kernel.assign([[1.0]])
    arguments = {
        "names": {"var_names": ["bias"]},
        "anchored": {"var_names": ["^bias$"]},
    }.get(how, {"var_list": biases})
    inner = O.SGD(1.0, weight_decay=0.1)
    if how == "before":
        inner.exclude_from_weight_decay(**arguments)
    optimizer = _agn(inner, period)
    if how != "before":
        optimizer.exclude_from_weight_decay(**arguments)
    optimizer.apply(
        [tf.zeros(v.shape) for v in model.trainable_variables],
        model.trainable_variables,
    )
    assert [float(bias[0]) for bias in biases] == [1, 1]
    for kernel in kernels:
        np.testing.assert_allclose(kernel.numpy(), 0.9, rtol=1e-6)


def test_exclude_a_variable_whose_name_is_part_of_another():
    raw, weight = (keras.Variable(1.0, name=n) for n in ("raw", "w"))
    optimizer = _agn(O.SGD(1.0, weight_decay=0.1), 1)
    optimizer.exclude_from_weight_decay(var_list=[weight])
    optimizer.apply([tf.constant(0.0)] * 2, [raw, weight])
    np.testing.assert_allclose((raw.numpy(), weight.numpy()), (0.9, 1.0))


# AGN under a strategy, and around the end of fit.


@replicas.on_mirrored_and_permuted
def test_a_moving_average_of_the_center_reaches_all_replicas(kind):
    strategy = replicas.STRATEGIES[kind](2)
    with strategy.scope():
        model = _dense()
        model.compile(_agn(O.SGD(0.1, use_ema=True, ema_momentum=0.9)), "mse")
    model.fit(X, Y, batch_size=2, verbose=0)
    kernels = replicas.values(strategy, model.layers[0].kernel)
    for kernel in kernels:
        np.testing.assert_array_equal(kernel, kernels[0])
    for center in replicas.values(
        strategy, model.optimizer.center_variables[0]
    ):
        np.testing.assert_array_equal(center, kernels[0])


def test_applied_outside_of_the_strategy():
    with replicas.mirrored(2).scope():
        weight = keras.Variable(10.0)
        optimizer = _agn()
    with pytest.raises(RuntimeError, match="outside of it, where there are no"):
        optimizer.apply([tf.constant(1.0)], [weight])
    assert weight.numpy() == 10


class _Values(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        optimizer = self.model.optimizer
        self.local = self.model.get_weights()[0].copy()
        self.center = optimizer.center_variables[0].numpy()


@replicas.on_mirrored_and_tpu
def test_a_file_that_is_saved_while_the_center_is_shown(kind, tmp_path):
    strategy = replicas.STRATEGIES[kind](2)
    path = os.path.join(tmp_path, "model.keras")
    with strategy.scope():
        model = _dense()
        model.compile(_agn(O.SGD(0.02), 3), "mse")
    values = _Values()
    model.fit(
        X,
        Y,
        batch_size=4,
        verbose=0,
        callbacks=[
            values,
            tf_xshard.SwapCenterWeights(swap_on_epoch=True),
            keras.callbacks.ModelCheckpoint(path),
        ],
    )
    assert np.abs(values.local - values.center).max() > 1e-3
    with strategy.scope():
        restored = keras.models.load_model(path)
    np.testing.assert_array_equal(restored.get_weights()[0], values.center)
    restored.optimizer.show_center(False)
    for local in replicas.values(strategy, restored.layers[0].kernel):
        np.testing.assert_array_equal(local, values.local)
    np.testing.assert_array_equal(
        restored.optimizer.center_variables[0].numpy(), values.center
    )


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


@pytest.mark.parametrize("kind", ["mirrored", "tpu"])
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


def test_an_inner_optimizer_that_has_been_built():
    inner = O.Adam(0.1)
    inner.build([keras.Variable(0.0)])
    with pytest.raises(ValueError, match="has been built"):
        _agn(inner)


def test_an_inner_optimizer_that_can_not_be_copied():
    with pytest.raises(
        ValueError, match="Pass a local_optimizer to AGNOptimizer"
    ):
        _agn(O.SGD(lambda: 0.1))
    optimizer = _agn(O.SGD(lambda: 0.1), local_optimizer=O.SGD(0.1))
    assert int(optimizer.exchanges) == 0
