"""Keras on the simulated TPU: `fit`, layers, hosts, files."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import fitting
from tests.support import replicas
from tests.support import seeds
from tf_xshard import testing

SGD = keras.optimizers.SGD


class _Attention(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 4, seed=1)

    def call(self, x):
        return self.attention(x, x, use_causal_mask=True)


def _images():
    return [
        keras.layers.Input((8, 8, 1)),
        keras.layers.Conv2D(3, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
    ]


def _sequences():
    return [
        keras.layers.Input((5,), dtype="int32"),
        keras.layers.Embedding(11, 8),
        _Attention(),
        keras.layers.SimpleRNN(4),
    ]


NUM_ROWS = 28


def _data(layers):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 8, 8, 1)).astype("float32")
    if layers is _sequences:
        x = rng.integers(0, 11, size=(NUM_ROWS, 5))
    return x, rng.normal(size=(NUM_ROWS, 2)).astype("float32")


def _model(layers):
    seeds.seed(3)
    model = keras.Sequential([*layers(), keras.layers.Dense(2)])
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    optimizer = SGD(rate, momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=3)
    return model


def _hosts():
    return testing.simulated_tpu_strategy(
        4, num_hosts=2, device_assignment=False
    )


@pytest.mark.parametrize(
    "layers, strategy_fn",
    [
        (_images, lambda: replicas.tpu(2)),
        pytest.param(
            *(_sequences, lambda: replicas.tpu_permuted(2)),
            marks=replicas.in_full,
        ),
        pytest.param(_images, _hosts, marks=replicas.in_full),
    ],
    ids=["images", "sequences", "hosts"],
)
def test_plain_keras_equals_one_device(layers, strategy_fn):
    """`fit` with a short last batch, `evaluate` and `predict` on odd ones."""
    x, y = _data(layers)
    expected, strategy = _model(layers), strategy_fn()
    start = expected.get_weights()
    with strategy.scope():
        model = _model(layers)
    fit = lambda one: (
        one.fit(
            fitting.batches(x, y, 12), epochs=1, shuffle=False, verbose=0
        ).history
    )
    history, its = fit(model), fit(expected)
    for variable, value, before in zip(
        model.weights, expected.get_weights(), start, strict=True
    ):
        for own in replicas.values(strategy, variable):
            np.testing.assert_allclose(own, value, atol=2e-6)
        assert np.abs(value - before).max() > 1e-3
    for key, values in its.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5)
    rows = x[:-1], y[:-1]
    np.testing.assert_allclose(
        model.evaluate(*rows, batch_size=12, verbose=0),
        expected.evaluate(*rows, batch_size=12, verbose=0),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        model.predict(x[:-1], 12, verbose=0),
        expected.predict(x[:-1], 12, verbose=0),
        atol=1e-5,
    )


def test_layers_with_state():
    """Statistics differ by replica; Keras makes equal masks, in each step."""
    strategy = replicas.tpu(2)
    with strategy.scope():
        dropout = keras.layers.Dropout(0.5, seed=1)
        normalization = keras.layers.BatchNormalization(momentum=0.5)
        normalization.build((None, 64))
        dense = keras.layers.Dense(
            1, dtype="mixed_bfloat16", kernel_initializer="ones"
        )
        dense.build((None, 64))

    @tf.function(autograph=False)
    def step():
        def on_replica():
            x = tf.fill([2, 64], replicas.power_of_ten())
            normalization(x, training=True)
            # Not a number of bfloat16.
            return dropout(tf.ones([64]), training=True), dense(x + 0.01)

        return strategy.run(on_replica)

    masks = []
    for _ in range(2):
        results = [strategy.experimental_local_results(one) for one in step()]
        first, second = (one.numpy() for one in results[0])
        np.testing.assert_array_equal(first, second)
        assert set(np.unique(first)) == {0.0, 2.0}
        masks.append(first)
    assert (masks[0] != masks[1]).any()
    for r, (mean, product) in enumerate(
        zip(
            replicas.values(strategy, normalization.moving_mean),
            results[1],
            strict=True,
        )
    ):
        np.testing.assert_allclose(mean, np.full(64, 0.75 * 10**r))
        assert product.dtype == tf.bfloat16
        x = tf.cast(tf.fill([2, 64], 10.0**r + 0.01), tf.bfloat16)
        np.testing.assert_array_equal(
            product, tf.matmul(x, tf.ones([64, 1], tf.bfloat16))
        )


@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data")
def test_custom_loop_over_a_distributed_dataset():
    """The loop is in the graph."""
    strategy = replicas.tpu(2)
    with strategy.scope():
        weight = keras.Variable(0.0)
    dataset = fitting.batches(np.arange(8.0, dtype="float32"), np.ones(8), 4)

    def on_replica(x, y):
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("SUM", tf.reduce_sum(x) * weight + 1.0)
        weight.assign(total)
        return total

    @tf.function
    def epoch(batches):
        total = 0.0
        for x, y in batches:
            losses = strategy.run(on_replica, args=(x, y))
            total += strategy.reduce("SUM", losses, axis=None)
        return total

    distributed = strategy.experimental_distribute_dataset(dataset)
    # First 2, then 2 * (4 + 5 + 6 + 7) + 2, each on both replicas.
    assert float(epoch(distributed)) == 2 * 2 + 2 * 46
    assert replicas.values(strategy, weight) == [46, 46]


def test_several_hosts():
    """Each host has an input pipeline of its own."""
    strategy = testing.simulated_tpu_strategy(8, num_hosts=4)
    assert strategy.extended.num_hosts == 4
    pipelines = []

    def dataset_of(context):
        pipelines.append(context.input_pipeline_id)
        first = 100.0 * context.input_pipeline_id
        return tf.data.Dataset.from_tensor_slices(first + tf.range(4.0)).batch(
            context.get_per_replica_batch_size(8)
        )

    iterator = iter(strategy.distribute_datasets_from_function(dataset_of))
    step = tf.function(
        lambda x: strategy.run(
            lambda x: (
                x,
                tf.distribute.get_replica_context().all_reduce("SUM", x),
            ),
            args=(x,),
        )
    )
    for shift in (0, 2):
        own, total = step(next(iterator))
        own = [float(v[0]) for v in strategy.experimental_local_results(own)]
        expected = [100 * h + shift + k for h in range(4) for k in range(2)]
        assert own == expected
        for value in strategy.experimental_local_results(total):
            assert float(value[0]) == sum(expected)
    assert pipelines == [0, 1, 2, 3]


def test_checkpoints_and_files(tmp_path):
    strategy = replicas.tpu(2)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(1)]
        )
        model.compile(SGD(0.05, momentum=0.9), "mse")
        model.optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step():
        variables = model.trainable_variables
        gradients = [tf.ones(v.shape) for v in variables]
        strategy.run(lambda: model.optimizer.apply(gradients, variables))

    def values(of):
        variables = [*of.weights, *of.optimizer.variables]
        return [replicas.values(strategy, v) for v in variables]

    step()
    kept = values(model)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    model.save(tmp_path / "model.keras")
    step()
    assert np.abs(model.get_weights()[0] - kept[0][0]).max() > 1e-2
    checkpoint.restore(path).assert_consumed()
    with strategy.scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    for restored in (model, loaded):
        for mine, theirs in zip(values(restored), kept, strict=True):
            np.testing.assert_array_equal(mine, theirs)
