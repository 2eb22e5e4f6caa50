"""Towers that are computed in one train step, on several devices.

global_mean_test.py has towers of several replicas.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import seeds
from tests.support import training

SGD = keras.optimizers.SGD
RATE = 0.1
T, V = TypeError, ValueError


def _sgd():
    return SGD(RATE)


def _split(optimizer, devices=None, model_fn=training.model, **compile_options):
    """A model that computes its towers in one step."""
    model = model_fn()
    step = tf_xshard.tower_train_step(devices)
    model.train_step = functools.partial(step, model)
    # XLA has one device, and can't refuse.
    options = {"loss": "mse", "jit_compile": False, **compile_options}
    model.compile(optimizer, **options)
    model.optimizer.build(model.trainable_variables)
    return model


def _towers(num_towers=2, **options):
    return tf_xshard.TowerOptimizer(_sgd(), num_towers, **options)


def _dense(**options):
    seeds.seed(0)
    return keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dense(1, **options)]
    )


class Towers(keras.Model):
    train_step = tf_xshard.tower_train_step(["CPU:1", "CPU:0"])


def test_fit_equals_the_whole_batch():
    """In a class; the last batch has 5 rows for 4 towers."""
    scaled = keras.optimizers.LossScaleOptimizer(_sgd())
    optimizer = tf_xshard.TowerOptimizer(scaled, 4)
    model = training.model()
    data = {"xy": training.data(101), "batch_size": 32, "num_steps": 8}
    split, weights = training.train(
        lambda: optimizer,
        model_fn=lambda: Towers(model.inputs, model.outputs),
        metrics=["mae"],
        jit_compile=False,
        auto_scale_loss=False,
        **data,
    )
    whole, expected = training.train(
        _sgd, metrics=["mae"], run_eagerly=True, **data
    )
    assert training.deviation(weights, expected) <= 1e-6
    start = training.weights(training.model())
    assert training.deviation(expected, start) > 0.01
    for name, values in whole.history.history.items():
        np.testing.assert_allclose(split.history.history[name], values, 1e-5)
    assert int(optimizer.iterations) == 8


def test_any_number_of_rows():
    """In one trace; also of fewer rows than towers, and of none."""
    make = functools.partial(_dense, kernel_regularizer="l2")
    model = _split(_towers(3), ["CPU:1", "CPU:2"], make)
    whole = make()
    whole.compile(_sgd(), "mse")
    step = tf.function(
        lambda x, y: model.train_step((x, y)),
        input_signature=[tf.TensorSpec([None, n]) for n in (8, 1)],
        autograph=False,
    )
    for num_rows in (32, 5, 1):
        batch = training.data(num_rows)
        step(*batch)
        whole.train_step(batch)
        difference = training.deviation(
            training.weights(model), training.weights(whole)
        )
        assert difference <= 1e-6
    step(*training.data(0))
    [kernel], [bias] = training.weights(model)
    [before], [same] = training.weights(whole)
    # Keras' l2 is a hundredth of the sum of squares.
    np.testing.assert_allclose(kernel, before * (1 - 0.02 * RATE), rtol=1e-6)
    np.testing.assert_allclose(bias, same, atol=1e-6)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_each_tower_is_on_its_device(num_replicas):
    names = [["CPU:2", "CPU:3"], ["CPU:4", "CPU:5"]]
    placed = []

    def forward(x):
        placed.append(int(tf.matmul(x, x, transpose_b=True).device[-1]))
        return x

    def make():
        layers = [keras.layers.Lambda(forward), keras.layers.Dense(1)]
        model = keras.Sequential([keras.layers.Input((8,)), *layers])
        placed.clear()
        return model

    strategy = tf.distribute.get_strategy()
    devices = names[0]
    if num_replicas > 1:
        strategy, devices = replicas.mirrored(num_replicas), lambda r: names[r]
    with strategy.scope():
        model = _split(_towers(), devices, make)
        training.run_parts(model, [[training.data(4)] * num_replicas])
    assert set(placed) == set(range(2, 2 + 2 * num_replicas))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_reduction_of_towers_of_unequal_size(reduction):
    """3 and 2 rows: NumPy's gradient of the mean, or of the sum of means."""
    x, y = training.data(5)
    model = _split(_towers(reduction=reduction), model_fn=_dense)
    [before], _ = training.weights(model)
    error = x @ before - y
    gradients = [
        2 * (x[rows] * error[rows]).mean(0)
        for rows in (slice(0, 3), slice(3, 5), slice(0, 5))
    ]
    gradient = gradients[2] if reduction == "mean" else sum(gradients[:2])
    metrics = model.train_step((x, y))
    [after], _ = training.weights(model)
    np.testing.assert_allclose(
        after[:, 0], before[:, 0] - RATE * gradient, rtol=1e-5
    )
    # What is reported is the mean over the rows in both.
    np.testing.assert_allclose(metrics["loss"], np.mean(error**2), rtol=1e-6)


class TwoInputsAndOutputs(keras.Model):
    """Without `training`; a regularizer, an added loss, an embedding."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2, kernel_regularizer="l2")
        self.table = keras.layers.Embedding(6, 2)

    def call(self, inputs):
        dense = self.dense(inputs["x"])
        self.add_loss(tf.reduce_mean(dense**2))
        return {"a": dense, "b": self.table(inputs["ids"])}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return super().compute_loss(x, y, y_pred, sample_weight)


def _of_sparse_rows():
    inputs = keras.layers.Input((4,), sparse=True)
    return keras.Sequential([inputs, keras.layers.Dense(1)])


def _structures():
    """Rows in equal parts, since the added loss is a mean of its own."""
    rng = np.random.default_rng(0)
    features = {
        "x": rng.normal(size=(6, 3)).astype("float32"),
        "ids": rng.integers(0, 6, 6),
    }
    targets = {name: rng.normal(size=(6, 2)).astype("f") for name in "ab"}
    return features, targets, rng.uniform(0.5, 2, 6).astype("float32")


def _sparse():
    rng = np.random.default_rng(0)
    x = tf.sparse.from_dense(rng.integers(0, 2, (7, 4)).astype("float32"))
    return x, rng.normal(size=(7, 1)).astype("float32")


@pytest.mark.parametrize(
    "num_towers, model_fn, data, options",
    [
        (
            *(2, TwoInputsAndOutputs, _structures),
            {"loss": {"a": "mse", "b": "mae"}, "metrics": {"a": "mae"}},
        ),
        (3, _of_sparse_rows, _sparse, {}),
    ],
    ids=["structures", "sparse"],
)
def test_it_equals_the_whole_batch(num_towers, model_fn, data, options):
    data, results = data(), []
    for is_split in (False, True):
        seeds.seed(0)
        model = model_fn()
        model(data[0])
        start = training.weights(model)
        if is_split:
            _split(_towers(num_towers), None, lambda m=model: m, **options)
        else:
            wrapped = tf_xshard.CrossShardOptimizer(_sgd())
            model.compile(wrapped, **{"loss": "mse", **options})
        metrics = model.train_step(data)
        results.append((training.weights(model), metrics))
    (expected, expected_metrics), (weights, metrics) = results
    difference = training.deviation(weights, expected)
    assert difference <= 1e-6 < training.deviation(expected, start)
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5)


def test_batches_and_calls_may_alternate():
    """A step in an open round of `apply` is refused, and changes nothing."""
    model = _split(_towers())
    batch = training.data(8)
    model.train_step(batch)
    before = training.weights(model)
    model.optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables])
    with pytest.raises(tf.errors.InvalidArgumentError, match="round of apply"):
        model.train_step(batch)
    assert training.deviation(training.weights(model), before) == 0
    model.optimizer.reset()
    model.train_step(batch)
    assert training.deviation(training.weights(model), before) > 1e-4


# Keras 3.12's variables, to NumPy.
@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_nothing_to_train():
    model = _split(_towers())
    model.trainable = False
    with pytest.warns(UserWarning, match="no trainable weights"):
        model.train_step(training.data(4))


def _first_step(devices=None, wrap=lambda towers: towers, **options):
    strategy = tf.distribute.get_strategy()
    model = _split(wrap(_towers()), devices, **options)
    parts = [training.data(4)] * strategy.num_replicas_in_sync
    training.run_parts(model, [parts])


def _on_a_tpu():
    with replicas.tpu(2).scope():
        _first_step(["CPU:1"])


@pytest.mark.parametrize(
    "error, text, call",
    [
        *(
            (T, "devices", functools.partial(tf_xshard.tower_train_step, one))
            for one in ("CPU:0", [], [0], 3)
        ),
        (T, "be a list", lambda: _first_step(lambda r: "CPU")),
        (
            *(T, r"Optimizer \(outermost\), got"),
            lambda: _first_step(wrap=tf_xshard.CrossShardOptimizer),
        ),
        (V, "jit_comp", lambda: _first_step(["CPU:1"], jit_compile=True)),
        (V, "TPU program has one", _on_a_tpu),
    ],
)
def test_refused(error, text, call):
    with pytest.raises(error, match=text):
        call()
