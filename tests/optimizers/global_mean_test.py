"""GlobalMean: one device's training, whatever the replicas' batches are."""

import functools
import gc
import itertools
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import seeds
from tf_xshard.distribute import site as site_lib
from tf_xshard.reduction import loss_records

SGD = keras.optimizers.SGD
GlobalMean = tf_xshard.GlobalMean
PAIRS = [[0, 1], [2, 3]]
RNG = np.random.default_rng(7)


def _cross(**options):
    return tf_xshard.CrossShardOptimizer(SGD(0.1), **options)


def _dense(dtype="float32"):
    seeds.seed(2)
    return keras.Sequential(
        [
            keras.layers.Input((4,), dtype=dtype),
            keras.layers.Dense(5, "tanh", dtype=dtype, kernel_regularizer="l2"),
            keras.layers.Dense(1, dtype=dtype),
        ]
    )


class _Attention(keras.layers.Layer):
    """A transformer block that keeps the mask of padded tokens."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True
        self.attention = keras.layers.MultiHeadAttention(2, 4)
        self.norm = keras.layers.LayerNormalization()

    def call(self, x, mask=None):
        mask = None if mask is None else mask[:, tf.newaxis]
        return self.norm(x + self.attention(x, x, attention_mask=mask))


def _transformer():
    seeds.seed(2)
    return keras.Sequential(
        [
            keras.layers.Input((10,), dtype="int32"),
            keras.layers.Embedding(12, 8, mask_zero=True),
            _Attention(),
            keras.layers.Dense(12),
        ]
    )


def _rows(num_rows, dtype="float32"):
    x = RNG.normal(size=(num_rows, 4)).astype(dtype)
    return x, np.sin(x[:, :1] + 2 * x[:, 1:2])


def _weighted(num_rows):
    weights = RNG.integers(0, 3, size=num_rows).astype("float32")
    return *_rows(num_rows), weights


def _tokens(num_rows, length):
    """Rows of `length` tokens, padded with zeros."""
    x = RNG.integers(1, 12, size=(num_rows, 10)).astype("int32")
    x[:, length:] = 0
    return x, np.roll(x, 1, 1)


TOKENS_LOSS = functools.partial(
    keras.losses.SparseCategoricalCrossentropy, from_logits=True
)
SQUARE = keras.losses.MeanSquaredError
WEIGHT_MEAN = functools.partial(SQUARE, reduction="mean_with_sample_weight")
# A model, a loss, the parts of two replicas in each step, and the tolerance.
CASES = {
    "ragged": (_dense, SQUARE, [[_rows(6), _rows(2)]] * 2, 1e-6),
    "float64": (
        functools.partial(_dense, "float64"),
        SQUARE,
        [[_rows(6, "float64"), _rows(2, "float64")]] * 2,
        1e-12,
    ),
    "one_row": (
        _dense,
        SQUARE,
        [[_rows(3), _rows(3)], [_rows(1), _rows(0)]],
        1e-6,
    ),
    "weights": (_dense, SQUARE, [[_weighted(5), _weighted(2)]] * 2, 1e-6),
    "sum_of_weights": (
        _dense,
        WEIGHT_MEAN,
        [[_weighted(4), _weighted(4)]] * 2,
        1e-6,
    ),
    "tokens": (
        _transformer,
        TOKENS_LOSS,
        [[_tokens(4, 10), _tokens(4, 1)]] * 2,
        1e-6,
    ),
    "ignored_class": (
        _transformer,
        functools.partial(TOKENS_LOSS, ignore_class=3),
        [[_tokens(4, 10), _tokens(4, 1)]] * 2,
        1e-6,
    ),
}
# Shapes are the same on all replicas of a TPU.
OF_EQUAL_SHAPES = ("sum_of_weights", "tokens", "ignored_class")


def _train(strategy, model_fn, loss, optimizer_fn, steps):
    """Trains; returns all replicas' weights, and each step's loss."""
    with strategy.scope():
        model = model_fn()
        model.compile(optimizer_fn(), loss)
        model.optimizer.build(model.trainable_variables)
    step = tf.function(
        lambda *batch: strategy.run(model.train_step, (batch,)),
        autograph=False,
        reduce_retracing=True,
    )
    losses = []
    for parts in steps:
        batch = [
            strategy.experimental_distribute_values_from_function(
                lambda replica, column=column: tf.constant(
                    column[replica.replica_id_in_sync_group]
                )
            )
            for column in zip(*parts, strict=True)
        ]
        model.reset_metrics()
        step(*batch)
        losses.append(float(model.metrics[0].result()))
    return [
        replicas.values(strategy, one) for one in model.trainable_variables
    ], losses


def _joined(steps):
    """The same steps with all rows on one device."""
    return [
        [tuple(np.concatenate(column) for column in zip(*parts, strict=True))]
        for parts in steps
    ]


@functools.cache
def _one_device(name, lr=0.1):
    model_fn, loss, steps, _ = CASES[name]
    return _train(
        tf.distribute.get_strategy(),
        model_fn,
        loss(),
        lambda: SGD(lr),
        _joined(steps),
    )


def _difference(got, reference):
    """The largest over all variables and replicas."""
    return max(
        np.max(np.abs(of_replica - expected[0]))
        for one, expected in zip(got[0], reference[0], strict=True)
        for of_replica in one
    )


@pytest.fixture
def in_float64():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


@pytest.mark.parametrize(
    "name, kind",
    [(name, "mirrored") for name in CASES]
    + list(zip(OF_EQUAL_SHAPES, itertools.cycle(replicas.TPUS), strict=False)),
)
def test_equals_one_device(name, kind, report, request):
    """Keras' own loss does not, in the same run."""
    model_fn, loss, steps, tolerance = CASES[name]
    if name == "float64":
        request.getfixturevalue("in_float64")
    strategy = replicas.STRATEGIES[kind](2)
    reference = _one_device(name)
    got, plain = (
        _train(strategy, model_fn, one, _cross, steps)
        for one in (GlobalMean(loss()), loss())
    )
    worst, without = (_difference(one, reference) for one in (got, plain))
    report(f"{name}, {kind}: {worst:.1e}, Keras' own loss {without:.1e}")
    assert worst <= tolerance
    assert without > 100 * tolerance
    np.testing.assert_allclose(got[1], reference[1], rtol=1e-5)


@pytest.mark.parametrize("num_replicas", [3, 8])
def test_1797_rows_in_batches_of_64(num_replicas, report):
    x, y = _rows(1797)

    def parts_of(n):
        # As TensorFlow splits a batch: the first parts have the same size.
        return [
            [
                (x[rows[0] : rows[-1] + 1], y[rows[0] : rows[-1] + 1])
                if len(rows)
                else (x[:0], y[:0])
                for size in [-(-min(64, 1797 - start) // n)]
                for r in range(n)
                for rows in [
                    range(
                        min(start + r * size, 1797),
                        min(start + (r + 1) * size, start + 64, 1797),
                    )
                ]
            ]
            for start in range(0, 1797, 64)
        ]

    reference, got, plain = (
        _train(replicas.mirrored(n), _dense, loss, optimizer, parts_of(n))
        for n, loss, optimizer in (
            (1, SQUARE(), functools.partial(SGD, 0.1)),
            (num_replicas, GlobalMean("mse"), _cross),
            (num_replicas, SQUARE(), _cross),
        )
    )
    worst, without = (_difference(one, reference) for one in (got, plain))
    report(f"{num_replicas} replicas: {worst:.1e}, Keras {without:.1e}")
    assert worst <= 1e-6
    assert without > 1e-4
    np.testing.assert_allclose(got[1], reference[1], rtol=1e-5)


@pytest.mark.parametrize("loss", [SQUARE, WEIGHT_MEAN])
def test_a_ragged_batch_on_a_tpu(loss):
    """Rows that pad the last replica's part are no items."""

    def fit(strategy, loss, wrap):
        with strategy.scope():
            model = _dense()
            model.compile(wrap(SGD(0.1)), loss)
        before = model.evaluate(x, y, 13, verbose=0, sample_weight=weights)
        model.fit(x, y, 13, verbose=0, shuffle=False, sample_weight=weights)
        return [
            replicas.values(strategy, v) for v in model.trainable_variables
        ], before

    x, y, weights = _weighted(13)
    reference = fit(tf.distribute.get_strategy(), loss(), lambda one: one)
    got = fit(
        replicas.tpu(2), GlobalMean(loss()), tf_xshard.CrossShardOptimizer
    )
    assert _difference(got, reference) <= 1e-6
    np.testing.assert_allclose(got[1], reference[1], rtol=1e-5)


@replicas.on_every_strategy
def test_groups(kind):
    """The mean is over the rows of a replica's group."""
    strategy = replicas.STRATEGIES[kind](4)
    parts = [_weighted(3) for _ in range(4)]
    got, _ = _train(
        strategy,
        _dense,
        GlobalMean(WEIGHT_MEAN(), PAIRS),
        lambda: _cross(group_assignment=PAIRS),
        [parts] * 2,
    )
    for group in PAIRS:
        reference = _train(
            tf.distribute.get_strategy(),
            _dense,
            WEIGHT_MEAN(),
            lambda: SGD(0.1),
            _joined([[parts[r] for r in group]] * 2),
        )
        of_group = [[one[r] for r in group] for one in got]
        assert _difference((of_group,), reference) <= 1e-6


def test_a_numpy_oracle():
    """One step of a linear model, by hand; a replica has weights of 0 only."""
    strategy = replicas.mirrored(3)
    parts = [_weighted(n) for n in (4, 1, 2)]
    parts[2] = (*parts[2][:2], np.zeros(2, "float32"))
    w0 = np.float32([[0.5], [-1], [2], [0.1]])

    def model():
        layer = keras.layers.Dense(1, use_bias=False)
        result = keras.Sequential([keras.layers.Input((4,)), layer])
        layer.kernel.assign(w0)
        return result

    [[*weights]], [loss] = _train(
        strategy, model, GlobalMean("mse"), _cross, [parts]
    )
    x, y, weight = (np.concatenate(one) for one in zip(*parts, strict=True))
    error = (x @ w0 - y) * weight[:, None]
    expected = w0 - 0.1 * (2 * x.T @ error) / len(x)
    for one in weights:
        np.testing.assert_allclose(one, expected, atol=1e-6)
    square = ((x @ w0 - y) ** 2)[:, 0] * weight
    np.testing.assert_allclose(loss, square.sum() / len(x), rtol=1e-6)


@replicas.on_mirrored_and_tpu
def test_no_items_at_all(kind):
    """The gradient and the loss are 0, not nan."""
    strategy = replicas.STRATEGIES[kind](2)
    part = (*_rows(3), np.zeros(3, "float32"))
    got, losses = _train(
        strategy,
        _dense,
        GlobalMean(WEIGHT_MEAN()),
        _cross,
        [[part, part]],
    )
    # A regularizer acts on the first kernel.
    start = _dense().trainable_variables[1:]
    for of_variable, value in zip(got[1:], start, strict=True):
        for one in of_variable:
            np.testing.assert_array_equal(one, value)
    assert np.isfinite(losses).all() and np.isfinite(got[0]).all()


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_batch_normalization_on_a_replica_without_rows(drop_remainder):
    """Its statistics and its gradient are nan, as in plain Keras."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(_cross(), GlobalMean("mse"))
    data = tf.data.Dataset.from_tensor_slices(_rows(9))
    data = data.batch(4, drop_remainder=drop_remainder)
    model.fit(data, verbose=0, shuffle=False)
    is_finite = {
        one.name: [np.isfinite(v).all() for v in replicas.values(strategy, one)]
        for one in model.weights
    }
    last = drop_remainder
    assert is_finite == {
        "gamma": [last, last],
        "beta": [True, True],
        "moving_mean": [True, last],
        "moving_variance": [True, last],
        "kernel": [True, True],
        "bias": [True, True],
    }


def test_two_outputs_with_loss_weights_and_a_sum():
    """Each loss has its own items; regularizers count as on one device."""

    def model():
        seeds.seed(2)
        x = keras.Input((4,))
        h = keras.layers.Dense(3, "tanh", kernel_regularizer="l2")(x)
        outputs = [keras.layers.Dense(1, name=n)(h) for n in "ab"]
        return keras.Model(x, outputs)

    def train(strategy, wrap, optimizer, batches):
        with strategy.scope():
            one = model()
            one.compile(
                optimizer(),
                [wrap("mse"), wrap(SQUARE(reduction="sum"))],
                loss_weights=[0.7, 0.02],
            )
        data = tf.data.Dataset.from_tensor_slices(batches).batch(8)
        history = one.fit(data, shuffle=False, verbose=0, epochs=2).history
        return [
            replicas.values(strategy, v) for v in one.trainable_variables
        ], history

    x, y = _rows(13)
    batches = (x, (y, y * y))
    reference = train(
        replicas.mirrored(1), lambda one: one, lambda: SGD(0.1), batches
    )
    got = train(replicas.mirrored(2), GlobalMean, _cross, batches)
    plain = train(replicas.mirrored(2), lambda one: one, _cross, batches)
    assert _difference(got, reference) <= 1e-6 < _difference(plain, reference)
    for name, values in reference[1].items():
        np.testing.assert_allclose(got[1][name], values, rtol=1e-5)


def test_fit_with_class_weights_and_all_metrics(report):
    def fit(num_replicas, wrap, optimizer):
        with replicas.mirrored(num_replicas).scope():
            seeds.seed(2)
            model = keras.Sequential(
                [keras.layers.Input((4,)), keras.layers.Dense(3, "softmax")]
            )
            model.compile(
                optimizer(),
                wrap("sparse_categorical_crossentropy"),
                metrics=["accuracy"],
                weighted_metrics=["accuracy"],
            )
        rng = np.random.default_rng(0)
        x = rng.normal(size=(17, 4)).astype("float32")
        y = rng.integers(0, 3, 17)
        history = model.fit(
            x, y, 8, 2, verbose=0, shuffle=False, validation_data=(x, y),
            class_weight={0: 0.0, 1: 5.0, 2: 0.5},
        )  # fmt: skip
        return history.history, model.get_weights()

    reference = fit(1, lambda one: one, lambda: SGD(0.1))
    got, plain = (
        fit(2, wrap, _cross) for wrap in (GlobalMean, lambda one: one)
    )
    for name, values in reference[0].items():
        np.testing.assert_allclose(got[0][name], values, rtol=1e-5)
    worst, without = (
        max(np.abs(a - b).max() for a, b in zip(one, reference[1], strict=True))
        for one in (got[1], plain[1])
    )
    report(f"class weights: {worst:.1e}, Keras {without:.1e}")
    assert worst <= 1e-6 < 1e-4 < without
    assert not np.allclose(plain[0]["loss"], reference[0]["loss"], rtol=1e-3)


@pytest.mark.parametrize("loss", ["crossentropy", "ce"])
def test_a_loss_that_is_chosen_by_shapes(loss):
    labels, predictions = np.array([[1], [0]]), np.float32([[0.7], [0.2]])
    expected = keras.losses.BinaryCrossentropy()(labels, predictions)
    assert float(GlobalMean(loss)(labels, predictions)) == float(expected)


def test_on_one_device_it_is_the_loss():
    x, y, weights = _weighted(5)
    for loss in (SQUARE(), WEIGHT_MEAN(), SQUARE(reduction="sum")):
        assert float(GlobalMean(loss)(y, x[:, :1], weights)) == float(
            loss(y, x[:, :1], weights)
        )


def test_a_custom_loop():
    """Also in eager mode; `value * N` is the mean over all rows."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = tf_xshard.CrossShardOptimizer(SGD(1.0))
        loss = GlobalMean(lambda y_true, y_pred: y_pred * 1.0)

    def on_replica():
        rows = tf.ones([3 if replicas.replica_id() == 0 else 1, 1])
        with tf.GradientTape() as tape:
            value = loss(rows, rows * (replicas.replica_id() + 1.0) * weight)
        optimizer.apply([tape.gradient(value, weight.value)], [weight])
        return value

    for run in (strategy.run, tf.function(strategy.run, autograph=False)):
        weight.assign(1.0)
        values = strategy.experimental_local_results(run(on_replica))
        # (3 * 1 + 1 * 2) / 4.
        np.testing.assert_allclose(np.multiply(values, 2), 1.25)
        np.testing.assert_allclose(replicas.values(strategy, weight), -0.25)


def test_evaluation_leaves_no_record():
    """Only a loss that is differentiated counts for the next step."""
    optimizer = tf_xshard.TowerOptimizer(SGD(1.0), 2)
    weight = keras.Variable(1.0)
    loss = GlobalMean("mse")
    zeros = np.zeros((1, 1), "float32")

    def step(num_rows):
        loss(zeros, zeros)
        with tf.GradientTape() as tape:
            rows = tf.ones([num_rows, 1])
            value = loss(rows * 0, rows * weight)
        optimizer.apply([tape.gradient(value, weight.value)], [weight])

    step(3)
    step(1)
    np.testing.assert_allclose(float(weight), -1.0)


def _tower(num_towers=2, **options):
    return tf_xshard.TowerOptimizer(SGD(0.1), num_towers, **options)


ROUND = [_tokens(2, 10), _tokens(2, 1), _tokens(2, 4), _tokens(2, 7)]
TOWERS = {
    "cross": lambda: _tower(4),
    # The TowerOptimizer is not the outermost.
    "tower_inside": lambda: tf_xshard.CrossShardOptimizer(_tower(4)),
    "loss_scale": lambda: tf_xshard.TowerOptimizer(
        keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=64.0), 4
    ),
}


@pytest.mark.parametrize(
    "name, num_replicas, kind",
    [
        ("cross", 1, "mirrored"),
        ("cross", 2, "mirrored"),
        ("tower_inside", 2, "mirrored"),
        ("loss_scale", 2, "mirrored"),
        ("cross", 2, "tpu"),
        ("cross", 2, "tpu_permuted"),
    ],
)
def test_a_round_of_towers(name, num_replicas, kind, report):
    """Four calls with different numbers of tokens are one batch of all."""
    strategy = replicas.STRATEGIES[kind](num_replicas)
    steps = [
        [tuple(c[r : r + 1] for c in part) for r in range(num_replicas)]
        if num_replicas == 2
        else [part]
        for part in ROUND * 2
    ]
    whole = tuple(np.concatenate(c) for c in zip(*ROUND, strict=True))
    reference = _train(
        tf.distribute.get_strategy(),
        _transformer,
        TOKENS_LOSS(),
        lambda: SGD(0.1),
        [[whole]] * 2,
    )
    got, plain = (
        _train(strategy, _transformer, loss, TOWERS[name], steps)
        for loss in (GlobalMean(TOKENS_LOSS()), TOKENS_LOSS())
    )
    worst, without = (_difference(one, reference) for one in (got, plain))
    report(f"{name}, {kind}({num_replicas}): {worst:.1e}, Keras {without:.1e}")
    assert worst <= 1e-6
    assert without > 1e-4


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_tower_train_step(num_replicas):
    """Towers of one batch, and the loss that `fit` shows."""

    def fit(n, loss, optimizer, is_split):
        with replicas.mirrored(n).scope():
            model = _transformer()
            model.compile(optimizer, loss)
            if is_split:
                # Replica r is on CPU:r.
                devices = lambda r: [f"CPU:{r}", f"CPU:{2 + r}"]
                step = tf_xshard.tower_train_step(devices)
                model.train_step = functools.partial(step, model)
        # Neither towers nor replicas have equally many tokens.
        parts = [ROUND[i] for i in (0, 3, 1, 2)]
        x, y = (np.concatenate(c) for c in zip(*parts, strict=True))
        history = model.fit(x, y, 8, 2, verbose=0, shuffle=False)
        return model.get_weights(), history.history["loss"]

    reference = fit(1, TOKENS_LOSS(), SGD(0.1), False)
    with replicas.mirrored(num_replicas).scope():
        got, plain = (
            fit(num_replicas, loss, _tower(2), True)
            for loss in (GlobalMean(TOKENS_LOSS()), TOKENS_LOSS())
        )
    for one, expected in zip(got[0], reference[0], strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-6)
    np.testing.assert_allclose(got[1], reference[1], rtol=1e-5)
    assert not np.allclose(plain[1], reference[1], rtol=1e-4)


def test_apply_towers_with_weights_and_with_records():
    weights = [keras.Variable(0.0) for _ in range(3)]
    for variable, towers, expected in zip(
        weights,
        # A mean of 1 and 5 with weights, from losses, and without either.
        [
            ([[tf.constant(1.0)], [tf.constant(5.0)]], [3, 1.0]),
            (None, None),
            ([[tf.constant(1.0)], [tf.constant(5.0)]], None),
        ],
        [-0.2, -0.2, -0.3],
        strict=True,
    ):
        gradients, given = towers
        if gradients is None:
            gradients = []
            for num_rows, value in ((3, 1.0), (1, 5.0)):
                with tf.GradientTape() as tape:
                    rows = tf.fill([num_rows, 1], value)
                    loss = GlobalMean(lambda y_true, y_pred: y_pred)(
                        rows, rows * variable
                    )
                gradients.append([tape.gradient(loss, variable.value)])
        _tower().apply_towers(gradients, [variable], given)
        np.testing.assert_allclose(float(variable), expected, rtol=1e-6)


def _apply_to(optimizer, *losses, num_rows=1):
    """One step whose gradient is that of a sum of losses."""
    weight = keras.Variable(1.0)
    optimizer.build([weight])
    rows = tf.ones([num_rows, 2])

    def on_replica():
        with tf.GradientTape() as tape:
            value = sum(one(rows * 0, rows * weight) for one in losses)
        optimizer.apply([tape.gradient(value, weight.value)], [weight])

    strategy = tf.distribute.get_strategy()
    strategy.run(on_replica)


def test_losses_whose_items_are_multiples_of_rows_share_a_round():
    """A call counts in proportion to its rows."""
    losses = [GlobalMean("mse"), GlobalMean(lambda y, p: p)]
    items = []
    for num_rows in (3, 1):
        optimizer = _tower()
        _apply_to(optimizer, *losses, num_rows=num_rows)
        items.append(float(replicas.tensor_of(optimizer._items)))
    assert items[0] == 3 * items[1] > 0


class _OwnCall(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return tf.reduce_mean(y_pred)


def _twice(optimizer, first, second):
    weight = keras.Variable(1.0)
    for loss in (first, second):
        with tf.GradientTape() as tape:
            value = loss(tf.zeros([1, 1]), tf.ones([1, 1]) * weight)
        optimizer.apply([tape.gradient(value, weight.value)], [weight])


def _in_another_function():
    optimizer = _tower()
    weight = keras.Variable(1.0)

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            value = GlobalMean("mse")(
                tf.zeros([1, 1]), tf.ones([1, 1]) * weight
            )
        return tape.gradient(value, weight.value)

    optimizer.apply([gradient()], [weight])


def _three_of_two():
    with tf.GradientTape(persistent=True) as tape:
        x = tf.constant([[1.0]])
        tape.watch(x)
        value = GlobalMean("mse")(x * 0, x)
    gradients = [tape.gradient(value, x) for _ in range(3)]
    _tower().apply_towers(
        [[gradients[0]], [gradients[1]]], [keras.Variable([[1.0]])]
    )


def _fit_beside_a_plain_loss(num_towers=2, train_step=None):
    x = keras.Input((4,))
    outputs = [keras.layers.Dense(1)(x), keras.layers.Dense(1)(x)]
    model = keras.Model(x, outputs)
    if train_step:
        model.train_step = functools.partial(train_step, model)
    model.compile(_tower(num_towers), [GlobalMean("mse"), "mae"])
    rows, y = _rows(4)
    model.fit(rows, [y, y], verbose=0)


def _two_towers_of_one_loss():
    one, other = keras.Variable(1.0), keras.Variable(1.0)
    optimizers = _tower(), _tower()
    for optimizer, variable in zip(optimizers, (one, other), strict=True):
        optimizer.build([variable])

    @tf.function(autograph=False)
    def step():
        rows = tf.ones([2, 1])
        with tf.GradientTape() as tape:
            value = GlobalMean("mse")(rows * 0, rows * one * other)
        gradients = tape.gradient(value, [one.value, other.value])
        for optimizer, gradient, variable in zip(
            optimizers, gradients, (one, other), strict=True
        ):
            optimizer.apply([gradient], [variable])

    step()


def _in_multi_optimizer():
    optimizer = keras.optimizers.MultiOptimizer(lambda variable: _tower())
    weight = keras.Variable(1.0)
    optimizer.build([weight])
    with tf.GradientTape() as tape:
        value = GlobalMean("mse")(tf.zeros([1, 1]), tf.ones([1, 1]) * weight)
    optimizer.apply([tape.gradient(value, weight.value)], [weight])


def _on_two(optimizer, *groups):
    with replicas.mirrored(2).scope():
        _apply_to(optimizer(), GlobalMean("mse", *groups))


def _other_groups_in_a_tower_train_step():
    with replicas.mirrored(2).scope():
        model = _dense()
        model.compile(_tower(), GlobalMean("mse", [[0], [1]]))
        step = tf_xshard.tower_train_step()
        model.train_step = functools.partial(step, model)
    model.fit(*_rows(8), 8, verbose=0)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (_other_groups_in_a_tower_train_step, ValueError, r"\[\[0, 1\]\]"),
        (lambda: GlobalMean(3), TypeError, "takes a loss as compile"),
        (lambda: GlobalMean("nonsense"), ValueError, "nonsense"),
        (lambda: GlobalMean(["mse"]), TypeError, "wrap the loss of each"),
        (
            lambda: GlobalMean(SQUARE(reduction=None)),
            ValueError,
            "has the reduction None",
        ),
        (
            lambda: GlobalMean(GlobalMean("mse")),
            ValueError,
            "can't wrap GlobalMean",
        ),
        (
            lambda: GlobalMean(tf_xshard.ScalarLoss(lambda y, p: 1.0)),
            ValueError,
            "can't wrap ScalarLoss",
        ),
        (
            lambda: GlobalMean(lambda y, p: tf.reduce_mean(p))(
                np.zeros(2), np.zeros(2)
            ),
            ValueError,
            "returned one number",
        ),
        (
            lambda: GlobalMean(_OwnCall())(np.zeros(2), np.zeros(2)),
            ValueError,
            "returned one number",
        ),
        (
            lambda: GlobalMean("mse", [[0], [0]]),
            ValueError,
            "must appear exactly once",
        ),
        (
            lambda: _apply_to(
                _tower(), GlobalMean("mse"), GlobalMean(SQUARE(reduction="sum"))
            ),
            ValueError,
            "whose numbers of items may differ",
        ),
        (
            lambda: _twice(_tower(), GlobalMean("mse"), SQUARE()),
            ValueError,
            "gets gradients of another loss.*call optimizer.reset",
        ),
        (
            lambda: _twice(_tower(), SQUARE(), GlobalMean("mse")),
            ValueError,
            "were not computed from a GlobalMean",
        ),
        (_in_another_function, ValueError, "computed in another tf.function"),
        (_three_of_two, ValueError, "Each tower needs the same"),
        (_fit_beside_a_plain_loss, ValueError, "Wrap all of them, or none"),
        (
            lambda: _fit_beside_a_plain_loss(2, tf_xshard.tower_train_step()),
            ValueError,
            "Wrap all of them, or none",
        ),
        (
            lambda: _apply_to(
                _tower(),
                GlobalMean("mse"),
                lambda y, p: GlobalMean("mse")(y[:1], p[:1]),
                num_rows=3,
            ),
            ValueError,
            "whose numbers of items may differ",
        ),
        (_two_towers_of_one_loss, ValueError, "took the number of items"),
        (_in_multi_optimizer, ValueError, "inside a MultiOptimizer"),
        (
            lambda: _on_two(
                lambda: _cross(loss_normalization="replica")
            ),
            ValueError,
            'loss_normalization="replica"',
        ),
        (
            lambda: _on_two(_cross, [[0], [1]]),
            ValueError,
            r"Pass GlobalMean\(loss, \[\[0, 1\]\]\)",
        ),
        (
            lambda: _on_two(lambda: tf_xshard.AGNOptimizer(SGD(0.1))),
            ValueError,
            "pass the loss itself",
        ),
        (
            lambda: _tower().apply_towers(
                [[1.0], [1.0]], [keras.Variable(1.0)], [1]
            ),
            ValueError,
            "got 1 weights",
        ),
        (
            lambda: _tower(reduction="sum").apply_towers(
                [[1.0], [1.0]], [keras.Variable(1.0)], [1, 1]
            ),
            ValueError,
            'Pass weights only with reduction="mean"',
        ),
    ],
)  # fmt: skip
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_dynamic_number_of_rows_is_checked_when_it_runs():
    optimizer = _tower()
    weight = keras.Variable(1.0)
    optimizer.build([weight])

    @tf.function(
        autograph=False, input_signature=[tf.TensorSpec([None, 1])] * 2
    )
    def step(x, z):
        with tf.GradientTape() as tape:
            value = sum(GlobalMean("mse")(v * 0, v * weight) for v in (x, z))
        optimizer.apply([tape.gradient(value, weight.value)], [weight])

    step(tf.ones([2, 1]), tf.ones([2, 1]))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="different numbers of rows"
    ):
        step(tf.ones([2, 1]), tf.ones([3, 1]))


def test_a_round_of_a_global_mean_is_not_continued_with_another_loss(tmp_path):
    saved, new = _towers_of_rows(), _towers_of_rows()
    _fit(saved, 0, 16, batch_size=16)
    saved.save_weights(tmp_path / "model.weights.h5")
    new.compile(new.optimizer, "mse", jit_compile=False)
    new.optimizer.build(new.trainable_variables)
    new.load_weights(tmp_path / "model.weights.h5")
    with pytest.raises(tf.errors.InvalidArgumentError, match="optimizer.reset"):
        _fit(new, 0, 16, batch_size=16)


def test_hierarchical_groups_around_local_steps():
    """Each step's mean is over the groups around the AGNOptimizer."""
    hosts = tf_xshard.GroupAssignment(PAIRS)

    def optimizer():
        return tf_xshard.CrossShardOptimizer(
            tf_xshard.AGNOptimizer(
                SGD(1.0),
                local_optimizer=SGD(0.1),
                communication_period=10,
                group_assignment=hosts.transposed(),
            ),
            group_assignment=hosts,
        )

    strategy = replicas.mirrored(4)
    parts = [_weighted(n) for n in (4, 1, 2, 3)]
    got, _ = _train(
        strategy, _dense, GlobalMean("mse", PAIRS), optimizer, [parts]
    )
    for group in PAIRS:
        reference = _train(
            tf.distribute.get_strategy(),
            _dense,
            SQUARE(),
            lambda: SGD(0.1),
            _joined([[parts[r] for r in group]]),
        )
        of_group = [[one[r] for r in group] for one in got]
        assert _difference((of_group,), reference) <= 1e-6


def test_another_loss_after_reset():
    optimizer = _tower()
    weight = keras.Variable(1.0)
    for loss in (GlobalMean("mse"), SQUARE()):
        optimizer.reset()
        with tf.GradientTape() as tape:
            value = loss(tf.zeros([1, 1]), tf.ones([1, 1]) * weight)
        optimizer.apply([tape.gradient(value, weight.value)], [weight])


def test_a_sum_of_towers_is_not_weighted():
    optimizer = _tower(reduction="sum")
    weight = keras.Variable(1.0)
    for num_rows in (3, 1):
        with tf.GradientTape() as tape:
            rows = tf.ones([num_rows, 1])
            value = GlobalMean(lambda y_true, y_pred: y_pred)(
                rows, rows * weight
            )
        optimizer.apply([tape.gradient(value, weight.value)], [weight])
    np.testing.assert_allclose(float(weight), 0.8, rtol=1e-6)


@pytest.mark.parametrize("is_applied", [False, True])
def test_no_graph_is_kept(is_applied):
    """Nor by a record that no optimizer takes."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = _cross()
        optimizer.build([weight])
    loss = GlobalMean("mse")

    def on_replica():
        with tf.GradientTape() as tape:
            value = loss(tf.zeros([1, 1]), tf.ones([1, 1]) * weight)
        gradient = tape.gradient(value, weight.value)
        if is_applied:
            optimizer.apply([gradient], [weight])
        return gradient

    step = tf.function(lambda: strategy.run(on_replica), autograph=False)
    graph = weakref.ref(step.get_concrete_function().graph)
    assert graph() is not None
    del step
    gc.collect()
    assert graph() is None


def test_one_loss_in_two_threads():
    """Each training gets its own numbers."""
    loss = GlobalMean(
        "mse", communication=tf_xshard.Communication(timeout_seconds=20)
    )
    results = {2.0: [], 10.0: []}

    def evaluate(value):
        strategy = replicas.mirrored(2)
        rows = tf.fill([4, 1], value)
        step = tf.function(
            lambda: strategy.run(loss, (rows * 0, rows)), autograph=False
        )
        for _ in range(200):
            results[value] += [float(one) for one in step().values]

    threads = [threading.Thread(target=evaluate, args=(v,)) for v in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Divided by the two replicas.
    assert results == {value: [value**2 / 2] * 400 for value in results}


def test_a_function_that_differentiates_it_can_be_saved(tmp_path):
    """TensorFlow asks for all gradients when it saves."""

    class Module(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([2, 1])], autograph=False)
        def gradient(self, x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = GlobalMean("mse")(x * 0, x)
            return tape.gradient(value, x)

    tf.saved_model.save(Module(), tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    x = tf.constant([[1.0], [3.0]])
    np.testing.assert_array_equal(loaded.gradient(x), x)


def test_records_do_not_pile_up():
    loss = GlobalMean("mse")
    variable = tf.Variable(1.0)
    for _ in range(loss_records._MOST_RECORDS + 10):
        with tf.GradientTape() as tape:
            value = loss(tf.zeros([1, 1]), tf.ones([1, 1]) * variable)
        tape.gradient(value, variable)
    records = loss_records.take(site_lib.current())
    assert len(records) == loss_records._MOST_RECORDS


@keras.saving.register_keras_serializable("tests")
def _absolute(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), -1)


@pytest.mark.parametrize(
    "loss", ["mse", SQUARE(reduction="sum"), _absolute, "crossentropy"]
)
def test_it_is_saved_with_the_model(loss, tmp_path):
    model = _dense()
    made = GlobalMean(
        loss,
        [[0]],
        communication=tf_xshard.Communication(timeout_seconds=7),
        name="mine",
    )
    model.compile("sgd", made)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").loss
    assert isinstance(loaded, GlobalMean)
    assert loaded.get_config() == made.get_config()
    assert loaded.group_assignment.to_list() == [[0]]
    assert loaded.name == "mine"


def test_an_exported_model_needs_no_tf_xshard(tmp_path):
    model = _dense()
    model.compile(_cross(), GlobalMean("mse"))
    tf_xshard.GroupState(model).export(0, tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").loss == "mse"


@replicas.on_mirrored_and_tpu
def test_the_plan_counts_it(kind):
    def plan(loss):
        with replicas.STRATEGIES[kind](2).scope():
            model = _dense()
            model.compile(_cross(), loss)
        return tf_xshard.communication_plan(model)

    operation, *others = plan(GlobalMean("mse")).operations
    assert (operation.purpose, operation.num_bytes) == ("loss", 8)
    assert others == list(plan("mse").operations)


def _towers_of_rows():
    model = _dense()
    model.compile(_tower(3), GlobalMean("mse"))
    return model


def _fit(model, *rows, batch_size):
    model.fit(
        *(column[slice(*rows)] for column in OPEN_ROUND_DATA),
        batch_size=batch_size,
        verbose=0,
        shuffle=False,
    )


OPEN_ROUND_DATA = _rows(40)


def _by_file(name):
    def move(saved, new, directory):
        saved.save(directory / name)
        return keras.models.load_model(directory / name)

    return move


def _by_group_state(saved, new, directory):
    tf_xshard.GroupState(saved).save(directory)
    tf_xshard.GroupState(new).restore(directory)
    return new


def _by_checkpoint(saved, new, directory):
    def checkpoint(model):
        return tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    path = checkpoint(saved).write(directory / "checkpoint")
    checkpoint(new).read(path).assert_existing_objects_matched()
    return new


def _by_set_weights(saved, new, directory):
    new.set_weights(saved.get_weights())
    new.optimizer.set_weights([v.numpy() for v in saved.optimizer.variables])
    return new


@functools.cache
def _trained_rows(num_rows):
    """A model that is only read; its round is open after 32 rows."""
    with replicas.mirrored(2).scope():
        model = _towers_of_rows()
        _fit(model, 0, num_rows, batch_size=16)
    return model


MOVES = {
    "keras": _by_file("model.keras"),
    "h5": _by_file("model.h5"),
    "group_state": _by_group_state,
    "checkpoint": _by_checkpoint,
    "set_weights": _by_set_weights,
}


@pytest.mark.parametrize(
    "name, is_used",
    [*((name, False) for name in MOVES), ("group_state", True)],
)
def test_an_open_round_is_saved(name, is_used, tmp_path):
    """A round that is saved after two of its calls equals an unsaved round.

    The sum of the items is created by a step, so a new optimizer lacks it.
    """
    with replicas.mirrored(2).scope():
        new = _towers_of_rows()
        if is_used:
            _fit(new, 0, 16, batch_size=16)
        moved = MOVES[name](_trained_rows(32), new, tmp_path)
        assert int(moved.optimizer.iterations.numpy()) == 0
        _fit(moved, 32, 40, batch_size=8)
    for one, value in zip(
        moved.get_weights(), _trained_rows(40).get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, value, atol=1e-7)


@pytest.mark.parametrize("name", ["keras", "group_state"])
def test_a_file_without_items_is_restored(name, tmp_path):
    """The round that was open meanwhile is forgotten, with its items."""
    expected, saved, used = (_towers_of_rows() for _ in range(3))
    saved.optimizer.build(saved.trainable_variables)
    _fit(expected, 0, 40, batch_size=16)
    _fit(used, 0, 16, batch_size=16)
    if name == "keras":
        saved.save(tmp_path / "model.keras")
        used.load_weights(tmp_path / "model.keras")
    else:
        used = _by_group_state(saved, used, tmp_path)
    _fit(used, 0, 40, batch_size=16)
    for one, value in zip(
        used.get_weights(), expected.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, value, atol=1e-7)
