"""Towers that are computed in one train step, on several devices."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import seeds
from tests.support import training

BATCH_SIZE = 32
NUM_ROWS = 101  # The last batch has 5 rows.


def _fit(
    optimizer,
    strategy=None,
    devices="no towers",
    model_fn=training.model,
    xy=None,
    drop_remainder=False,
    **compile_options,
):
    """Trains on the data three times; weights of every replica, the history."""
    x, y = training.data(NUM_ROWS) if xy is None else xy
    compile_options = {"loss": "mse", "metrics": ["mae"], **compile_options}
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = model_fn()
        if devices != "no towers":
            model.train_step = functools.partial(
                tf_xshard.tower_train_step(devices), model
            )
        model.compile(optimizer(), **compile_options)
        model.optimizer.build(model.trainable_variables)
    history = model.fit(
        tf.data.Dataset.from_tensor_slices((x, y))
        .batch(BATCH_SIZE, drop_remainder)
        .repeat(3),
        shuffle=False,
        verbose=0,
    )
    return training.weights(model, strategy), history.history, model


def _momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)


def _check(got, reference, report):
    weights, history, _ = got
    worst = training.deviation(weights, reference[0])
    report(f"max |dw| {worst:.1e}")
    assert worst <= 1e-6
    moved = training.deviation(reference[0], training.initial())
    assert moved > 0.01
    for name, values in reference[1].items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize(
    "num_towers, devices",
    [(2, None), (3, ["CPU:1", "CPU:2", "CPU:3"]), (4, ["CPU:1", "CPU:0"])],
    ids=["2", "3", "4_on_2"],
)
def test_fit_equals_the_whole_batch(
    num_towers, devices, drop_remainder, report
):
    reference = _fit(_momentum, drop_remainder=drop_remainder)
    got = _fit(
        lambda: tf_xshard.TowerOptimizer(_momentum(), num_towers),
        None,
        devices,
        drop_remainder=drop_remainder,
    )
    _check(got, reference, report)
    assert int(got[2].optimizer.iterations) == 3 * (NUM_ROWS // BATCH_SIZE) + (
        0 if drop_remainder else 3
    )


@replicas.on_mirrored_and_permuted
def test_under_a_strategy(kind, report):
    """Each replica splits its own part, on devices of its own."""
    strategy = replicas.STRATEGIES[kind](2)
    devices = None
    if kind == "mirrored":
        # Replica r is on CPU:r.
        devices = lambda r: [f"CPU:{r}", f"CPU:{2 + r}"]
    reference = _fit(
        lambda: tf_xshard.CrossShardOptimizer(_momentum()), strategy
    )
    got = _fit(
        lambda: tf_xshard.TowerOptimizer(_momentum(), 2), strategy, devices
    )
    _check(got, reference, report)


@pytest.mark.parametrize(
    "strategy", [None, replicas.mirrored], ids=["none", "mirrored"]
)
def test_each_tower_is_on_its_device(strategy):
    strategy = strategy and strategy(2)
    placed = []

    def forward(x):
        placed.append(tf.matmul(x, x, transpose_b=True).device)
        return x

    def model():
        return keras.Sequential(
            [keras.layers.Input((8,)), keras.layers.Lambda(forward)]
            + [keras.layers.Dense(1)]
        )

    names = [["CPU:2", "CPU:3"], ["CPU:4", "CPU:5"]]
    _fit(
        lambda: tf_xshard.TowerOptimizer(_momentum(), 2),
        strategy,
        (lambda r: names[r]) if strategy else names[0],
        model,
    )
    indices = {int(device[-1]) for device in placed if device}
    assert indices == ({2, 3, 4, 5} if strategy else {2, 3})


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_reduction_of_towers_of_unequal_size(reduction):
    """3 and 2 rows: NumPy's gradient of the mean, or of the sum of means."""
    x = np.arange(10, dtype="float32").reshape(5, 2)
    y = np.ones([5, 1], "float32")
    rows = [slice(0, 3), slice(3, 5)]
    gradients = [
        2 * (x[part] * (x[part].sum(1, keepdims=True) - y[part]))
        for part in rows
    ]
    expected = (
        np.concatenate(gradients).mean(0)
        if reduction == "mean"
        else sum(gradient.mean(0) for gradient in gradients)
    )

    def model():
        return keras.Sequential(
            [
                keras.layers.Input((2,)),
                keras.layers.Dense(
                    1, use_bias=False, kernel_initializer="ones"
                ),
            ]
        )

    model = model()
    model.train_step = functools.partial(tf_xshard.tower_train_step(), model)
    model.compile(
        tf_xshard.TowerOptimizer(keras.optimizers.SGD(1.0), 2, reduction), "mse"
    )
    loss = model.train_on_batch(x, y)
    [[kernel]] = training.weights(model)
    np.testing.assert_allclose(1 - kernel[:, 0], expected, rtol=1e-6)
    # What is reported is the mean over the rows in both.
    np.testing.assert_allclose(
        loss, np.mean((x.sum(1, keepdims=True) - y) ** 2), rtol=1e-6
    )


class TwoInputsAndOutputs(keras.Model):
    """`call` without `training`; a regularizer, an added loss, an embedding."""

    def __init__(self):
        seeds.seed(3)
        super().__init__()
        self.dense = keras.layers.Dense(2, kernel_regularizer="l2")
        self.table = keras.layers.Embedding(6, 2)

    def call(self, inputs):
        dense = self.dense(inputs["x"])
        self.add_loss(tf.reduce_mean(dense**2))
        return {"a": dense, "b": self.table(inputs["ids"])}


def test_structures_weights_and_added_losses(report):
    rng = np.random.default_rng(0)
    features = {
        "x": rng.normal(size=(22, 3)).astype("float32"),
        "ids": rng.integers(0, 6, 22),
    }
    targets = {
        name: rng.normal(size=(22, 2)).astype("float32") for name in "ab"
    }
    weights = rng.uniform(0.5, 2, 22).astype("float32")

    def trained(optimizer, towers):
        model = TwoInputsAndOutputs()
        model({name: value[:1] for name, value in features.items()})
        start = training.weights(model)
        if towers:
            model.train_step = functools.partial(
                tf_xshard.tower_train_step(["CPU:1", "CPU:2"]), model
            )
        model.compile(optimizer, {"a": "mse", "b": "mae"}, metrics={"a": "mae"})
        dataset = tf.data.Dataset.from_tensor_slices(
            (features, targets, weights)
        )
        # Keras weights the losses of outputs by rows where it knows them.
        dataset = dataset.batch(5, drop_remainder=True)
        history = model.fit(dataset, epochs=2, shuffle=False, verbose=0)
        return training.weights(model), start, history.history

    want, start, history = trained(
        tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(0.1)), False
    )
    got, _, of_towers = trained(
        tf_xshard.TowerOptimizer(keras.optimizers.SGD(0.1), 2), True
    )
    worst = training.deviation(got, want)
    report(f"max |dw| {worst:.1e}")
    assert worst <= 1e-6 < training.deviation(want, start)
    assert history.keys() == of_towers.keys()
    for name, values in history.items():
        np.testing.assert_allclose(of_towers[name], values, rtol=1e-5)


def test_sparse_inputs():
    rng = np.random.default_rng(0)
    dense = rng.integers(0, 2, (7, 4)).astype("float32")
    y = rng.normal(size=(7, 1)).astype("float32")
    kernels = []
    for num_towers, x in ((1, dense), (3, tf.sparse.from_dense(dense))):
        seeds.seed(0)
        model = keras.Sequential(
            [
                keras.layers.Input((4,), sparse=num_towers > 1),
                keras.layers.Dense(1),
            ]
        )
        model.train_step = functools.partial(
            tf_xshard.tower_train_step(), model
        )
        model.compile(
            tf_xshard.TowerOptimizer(keras.optimizers.SGD(0.1), num_towers),
            "mse",
        )
        dataset = tf.data.Dataset.from_tensors((x, y)).repeat(3)
        model.fit(dataset, shuffle=False, verbose=0)
        kernels.append(training.weights(model))
    assert training.deviation(*kernels) <= 1e-6


def test_fewer_rows_than_towers():
    """Nothing is lost, and nothing becomes nan."""
    xy = training.data(BATCH_SIZE + 1)
    reference = _fit(_momentum, xy=xy)
    got = _fit(
        lambda: tf_xshard.TowerOptimizer(_momentum(), 4), None, None, xy=xy
    )
    assert training.deviation(got[0], reference[0]) <= 1e-6


def test_loss_scaling():
    def scaled():
        return keras.optimizers.LossScaleOptimizer(
            _momentum(), initial_scale=1024
        )

    reference = _fit(_momentum)
    got = _fit(
        lambda: tf_xshard.TowerOptimizer(scaled(), 2),
        None,
        ["CPU:1", "CPU:2"],
        auto_scale_loss=False,
    )
    assert training.deviation(got[0], reference[0]) <= 1e-6


def test_a_model_class():
    """Assigned in a class, it survives saving and loading with it."""

    class Towers(keras.Model):
        train_step = tf_xshard.tower_train_step(["CPU:1", "CPU:2"])

    def model():
        plain = training.model()
        return Towers(plain.inputs, plain.outputs)

    got = _fit(lambda: tf_xshard.TowerOptimizer(_momentum(), 2), model_fn=model)
    assert training.deviation(got[0], _fit(_momentum)[0]) <= 1e-6


def test_batches_and_calls_may_alternate():
    """A step in an open round of `apply` is refused, and changes nothing."""
    model = training.model()
    model.train_step = functools.partial(tf_xshard.tower_train_step(), model)
    model.compile(tf_xshard.TowerOptimizer(_momentum(), 2), "mse")
    x, y = training.data(BATCH_SIZE)
    model.train_on_batch(x, y)
    before = training.weights(model)
    model.optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables])
    with pytest.raises(tf.errors.InvalidArgumentError, match="round of apply"):
        model.train_on_batch(x, y)
    assert training.deviation(training.weights(model), before) == 0
    model.optimizer.reset()
    model.train_on_batch(x, y)
    assert training.deviation(training.weights(model), before) > 1e-4


class _Plain(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)


class WithoutTraining(_Plain):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return tf.reduce_mean((y - y_pred) ** 2)


class WithAScalar(_Plain):
    def call(self, x):
        return {"y": self.dense(x), "norm": tf.norm(x)}

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return tf.reduce_mean((y - y_pred["y"]) ** 2)


@pytest.mark.parametrize("model_class", [WithoutTraining, WithAScalar])
def test_models_with_a_loss_of_their_own(model_class):
    x, y = training.data(12)
    results = []
    for towers in (False, True):
        seeds.seed(0)
        model = model_class()
        model(x)
        optimizer = keras.optimizers.SGD(0.1)
        if towers:
            optimizer = tf_xshard.TowerOptimizer(optimizer, 3)
            model.train_step = functools.partial(
                tf_xshard.tower_train_step(), model
            )
        model.compile(optimizer)
        model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
        results.append(training.weights(model))
    assert training.deviation(*results) <= 1e-6


def test_masked_metrics():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 5, 3)).astype("float32")
    x[:, 3:] = 0
    results = []
    for towers in (False, True):
        seeds.seed(0)
        model = keras.Sequential(
            [
                keras.layers.Input((5, 3)),
                keras.layers.Masking(),
                keras.layers.Dense(1),
            ]
        )
        optimizer = keras.optimizers.SGD(0.1)
        if towers:
            optimizer = tf_xshard.TowerOptimizer(optimizer, 2)
            model.train_step = functools.partial(
                tf_xshard.tower_train_step(), model
            )
        model.compile(optimizer, "mse", metrics=["mae"])
        results.append(
            model.fit(
                x, x[..., :1] + 1, batch_size=7, shuffle=False, verbose=0
            ).history
        )
    np.testing.assert_allclose(results[1]["mae"], results[0]["mae"], rtol=1e-5)


def test_an_empty_shard_with_a_regularizer():
    """Five rows in batches of four: one replica of the last batch has none."""
    strategy = replicas.mirrored(2)
    results = []
    for towers in (False, True):
        with strategy.scope():
            seeds.seed(0)
            model = keras.Sequential(
                [
                    keras.layers.Input((8,)),
                    keras.layers.Dense(1, kernel_regularizer="l2"),
                ]
            )
            optimizer = keras.optimizers.SGD(0.1)
            if towers:
                optimizer = tf_xshard.TowerOptimizer(optimizer, 2)
                model.train_step = functools.partial(
                    tf_xshard.tower_train_step(), model
                )
            else:
                optimizer = tf_xshard.CrossShardOptimizer(optimizer)
            model.compile(optimizer, "mse")
        x, y = training.data(5)
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        results.append(training.weights(model, strategy))
    assert training.deviation(*results) <= 1e-6


# Keras 3.12's variables, to NumPy.
@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_nothing_to_train():
    model = training.model()
    model.trainable = False
    model.train_step = functools.partial(tf_xshard.tower_train_step(), model)
    model.compile(tf_xshard.TowerOptimizer(_momentum(), 2), "mse")
    with pytest.warns(UserWarning, match="no trainable weights"):
        model.train_on_batch(*training.data(4))


def test_devices_of_a_callable_are_checked():
    with pytest.raises(TypeError, match="must be a list of device names"):
        _fit(
            lambda: tf_xshard.TowerOptimizer(_momentum(), 2),
            None,
            lambda r: "CPU",
        )


@pytest.mark.parametrize(
    "devices", ["CPU:0", [], [0], 3], ids=["str", "empty", "int", "number"]
)
def test_refuses_devices(devices):
    with pytest.raises(TypeError, match="devices"):
        tf_xshard.tower_train_step(devices)


def test_refuses_another_optimizer():
    with pytest.raises(TypeError, match=r"TowerOptimizer \(outermost\), got"):
        _fit(
            lambda: tf_xshard.CrossShardOptimizer(
                tf_xshard.TowerOptimizer(_momentum(), 2)
            ),
            None,
            None,
        )


def test_refuses_devices_where_there_is_one():
    towers = lambda: tf_xshard.TowerOptimizer(_momentum(), 2)
    with pytest.raises(ValueError, match="jit_compile=False"):
        _fit(towers, None, ["CPU:1"], jit_compile=True)
    with pytest.raises(ValueError, match="A TPU program has one device"):
        _fit(towers, replicas.tpu(4), ["CPU:1"])
