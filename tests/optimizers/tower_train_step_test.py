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
CROSS = tf_xshard.CrossShardOptimizer


def _fit(
    optimizer,
    strategy=None,
    devices="no towers",
    model_fn=training.model,
    xy=None,
    batch_size=BATCH_SIZE,
    drop_remainder=False,
    **compile_options,
):
    """Trains on the data three times; weights of every replica, the history."""
    seeds.seed(0)
    compile_options = {
        "loss": "mse",
        "metrics": ["mae"],
        # Keras's default compiles with XLA if there is a GPU.
        "jit_compile": "auto" if devices in (None, "no towers") else False,
        **compile_options,
    }
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = model_fn()
        if devices != "no towers":
            model.train_step = functools.partial(
                tf_xshard.tower_train_step(devices), model
            )
        model.compile(optimizer(), **compile_options)
        model.optimizer.build(model.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices(
        training.data(NUM_ROWS) if xy is None else xy
    )
    dataset = dataset.batch(batch_size, drop_remainder).repeat(3)
    history = model.fit(dataset, shuffle=False, verbose=0)
    return training.weights(model, strategy), history.history, model


def _momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)


def _as_it_is(inner):
    return inner


def _two_towers():
    return tf_xshard.TowerOptimizer(_momentum(), 2)


class Towers(keras.Model):
    train_step = tf_xshard.tower_train_step(["CPU:1", "CPU:2"])


def _of_a_class():
    plain = training.model()
    return Towers(plain.inputs, plain.outputs)


@functools.cache
def _whole_batches(drop_remainder=False, num_rows=NUM_ROWS):
    xy = training.data(num_rows)
    return _fit(_momentum, xy=xy, drop_remainder=drop_remainder)


def _check(got, reference, report):
    weights, history, _ = got
    worst = training.deviation(weights, reference[0])
    report(f"max |dw| {worst:.1e}")
    assert worst <= 1e-6
    moved = training.deviation(reference[0], training.initial())
    assert moved > 0.01
    for name, values in reference[1].items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


@pytest.mark.parametrize(
    "num_towers, devices, drop_remainder",
    [
        (2, None, False),
        (3, ["CPU:1", "CPU:2", "CPU:3"], True),
        (4, ["CPU:1", "CPU:0"], False),
    ],
)
def test_fit_equals_the_whole_batch(
    num_towers, devices, drop_remainder, report
):
    got = _fit(
        lambda: tf_xshard.TowerOptimizer(_momentum(), num_towers),
        None,
        devices,
        drop_remainder=drop_remainder,
    )
    _check(got, _whole_batches(drop_remainder), report)
    steps = 3 * (NUM_ROWS // BATCH_SIZE + (not drop_remainder))
    assert int(got[2].optimizer.iterations) == steps


@pytest.mark.parametrize(
    "wrap, num_towers, num_rows, options",
    [
        # Nothing is lost, and nothing becomes nan.
        (_as_it_is, 4, BATCH_SIZE + 1, {"devices": None}),
        (keras.optimizers.LossScaleOptimizer, 2, NUM_ROWS, {"devices": None}),
        # In a class it survives saving and loading.
        (
            _as_it_is,
            2,
            NUM_ROWS,
            {"model_fn": _of_a_class, "jit_compile": False},
        ),
    ],
    ids=["fewer_rows_than_towers", "loss_scale", "class"],
)
def test_the_weights_equal(wrap, num_towers, num_rows, options):
    got = _fit(
        lambda: tf_xshard.TowerOptimizer(wrap(_momentum()), num_towers),
        xy=training.data(num_rows),
        auto_scale_loss=False,
        **options,
    )
    expected = _whole_batches(num_rows=num_rows)
    assert training.deviation(got[0], expected[0]) <= 1e-6


@replicas.on_mirrored_and_permuted
def test_under_a_strategy(kind, report):
    """Each replica splits its own part, on devices of its own."""
    strategy = replicas.STRATEGIES[kind](2)
    devices = None
    if kind == "mirrored":
        # Replica r is on CPU:r.
        devices = lambda r: [f"CPU:{r}", f"CPU:{2 + r}"]
    reference = _fit(lambda: CROSS(_momentum()), strategy)
    got = _fit(_two_towers, strategy, devices)
    _check(got, reference, report)


@pytest.mark.parametrize("is_replicated", [False, True])
def test_each_tower_is_on_its_device(is_replicated):
    names = [["CPU:2", "CPU:3"], ["CPU:4", "CPU:5"]]
    placed = []

    def forward(x):
        placed.append(tf.matmul(x, x, transpose_b=True).device)
        return x

    layers = lambda: [
        keras.layers.Input((8,)),
        keras.layers.Lambda(forward),
        keras.layers.Dense(1),
    ]
    _fit(
        _two_towers,
        replicas.mirrored(2) if is_replicated else None,
        (lambda r: names[r]) if is_replicated else names[0],
        lambda: keras.Sequential(layers()),
    )
    indices = {int(device[-1]) for device in placed if device}
    assert indices == ({2, 3, 4, 5} if is_replicated else {2, 3})


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

    model = keras.Sequential(
        [
            keras.layers.Input((2,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
        ]
    )
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


def _whole_and_towers(num_towers, model_fn, xy, strategy=None, **kwargs):
    """What `_fit` returns, as a whole and in towers."""

    def sgd():
        return CROSS(keras.optimizers.SGD(0.1))

    towers = lambda: tf_xshard.TowerOptimizer(sgd(), num_towers)
    return (
        _fit(sgd, strategy, "no towers", model_fn, xy, **kwargs),
        _fit(towers, strategy, None, model_fn, xy, **kwargs),
    )


class TwoInputsAndOutputs(keras.Model):
    """`call` without `training`; a regularizer, an added loss, an embedding."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2, kernel_regularizer="l2")
        self.table = keras.layers.Embedding(6, 2)

    def call(self, inputs):
        dense = self.dense(inputs["x"])
        self.add_loss(tf.reduce_mean(dense**2))
        return {"a": dense, "b": self.table(inputs["ids"])}


def test_structures_weights_and_added_losses():
    rng = np.random.default_rng(0)
    features = {
        "x": rng.normal(size=(22, 3)).astype("float32"),
        "ids": rng.integers(0, 6, 22),
    }
    targets = {
        name: rng.normal(size=(22, 2)).astype("float32") for name in "ab"
    }
    weights = rng.uniform(0.5, 2, 22).astype("float32")

    def make():
        model = TwoInputsAndOutputs()
        model({name: value[:1] for name, value in features.items()})
        return model

    # Keras weights the losses of outputs by rows where it knows them.
    (want, history, _), (got, of_towers, _) = _whole_and_towers(
        2,
        make,
        (features, targets, weights),
        batch_size=5,
        drop_remainder=True,
        loss={"a": "mse", "b": "mae"},
        metrics={"a": "mae"},
    )
    seeds.seed(0)
    start = training.weights(make())
    worst = training.deviation(got, want)
    assert worst <= 1e-6 < training.deviation(want, start)
    assert history.keys() == of_towers.keys()
    for name, values in history.items():
        np.testing.assert_allclose(of_towers[name], values, rtol=1e-5)


def test_sparse_inputs():
    rng = np.random.default_rng(0)
    dense = rng.integers(0, 2, (7, 4)).astype("float32")
    y = rng.normal(size=(7, 1)).astype("float32")
    found = []
    for num_towers, x in ((1, dense), (3, tf.sparse.from_dense(dense))):
        inputs = keras.layers.Input((4,), sparse=num_towers > 1)
        towers = tf_xshard.TowerOptimizer(keras.optimizers.SGD(0.1), num_towers)
        model_fn = lambda inputs=inputs: keras.Sequential(
            [inputs, keras.layers.Dense(1)]
        )
        weights, _, _ = _fit(
            lambda t=towers: t,
            devices=None,
            model_fn=model_fn,
            xy=(x, y),
            jit_compile=False,  # XLA has no operation for sparse tensors.
        )
        found.append(weights)
    assert training.deviation(*found) <= 1e-6


class WithoutTraining(keras.Model):
    """An output that has no rows; `compute_loss` takes no `training`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return {"y": self.dense(x), "norm": tf.norm(x)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return tf.reduce_mean((y - y_pred["y"]) ** 2)


def test_a_model_with_a_loss_of_its_own():
    xy = training.data(12)

    def make():
        model = WithoutTraining()
        model(xy[0])
        return model

    whole, towers = _whole_and_towers(
        3, make, xy, batch_size=6, loss=None, metrics=None
    )
    assert training.deviation(towers[0], whole[0]) <= 1e-6


def test_masked_metrics():
    x = np.random.default_rng(0).normal(size=(20, 5, 3)).astype("float32")
    x[:, 3:] = 0
    layers = lambda: [
        keras.layers.Input((5, 3)),
        keras.layers.Masking(),
        keras.layers.Dense(1),
    ]
    whole, towers = _whole_and_towers(
        2,
        lambda: keras.Sequential(layers()),
        (x, x[..., :1] + 1),
        batch_size=7,
    )
    np.testing.assert_allclose(towers[1]["mae"], whole[1]["mae"], rtol=1e-5)


def test_an_empty_shard_with_a_regularizer():
    """Five rows in batches of four: one replica of the last batch has none."""
    layers = lambda: [
        keras.layers.Input((8,)),
        keras.layers.Dense(1, kernel_regularizer="l2"),
    ]
    whole, towers = _whole_and_towers(
        2,
        lambda: keras.Sequential(layers()),
        training.data(5),
        replicas.mirrored(2),
        batch_size=4,
    )
    assert training.deviation(towers[0], whole[0]) <= 1e-6


def test_batches_and_calls_may_alternate():
    """A step in an open round of `apply` is refused, and changes nothing."""
    model = training.model()
    model.train_step = functools.partial(tf_xshard.tower_train_step(), model)
    # XLA programs can't refuse.
    model.compile(_two_towers(), "mse", jit_compile=False)
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


# Keras 3.12's variables, to NumPy.
@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_nothing_to_train():
    model = training.model()
    model.trainable = False
    model.train_step = functools.partial(tf_xshard.tower_train_step(), model)
    model.compile(_two_towers(), "mse")
    with pytest.warns(UserWarning, match="no trainable weights"):
        model.train_on_batch(*training.data(4))


@pytest.mark.parametrize(
    "devices", ["CPU:0", [], [0], 3], ids=["str", "empty", "int", "number"]
)
def test_refuses_devices(devices):
    with pytest.raises(TypeError, match="devices"):
        tf_xshard.tower_train_step(devices)


@pytest.mark.parametrize(
    "wrap, kind, devices, jit_compile, error, text",
    [
        (CROSS, None, None, False, TypeError, r"Optimizer \(outermost\), got"),
        (_as_it_is, None, lambda r: "CPU", False, TypeError, "be a list"),
        (_as_it_is, None, ["CPU:1"], True, ValueError, "jit_compile=Fal"),
        (_as_it_is, "tpu", ["CPU:1"], False, ValueError, "TPU program has one"),
    ],
)
def test_refuses_in_the_first_step(
    wrap, kind, devices, jit_compile, error, text
):
    with pytest.raises(error, match=text):
        _fit(
            lambda: wrap(_two_towers()),
            kind and replicas.STRATEGIES[kind](2),
            devices,
            jit_compile=jit_compile,
        )
