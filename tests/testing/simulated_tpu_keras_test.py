"""Keras on the simulated TPU: `fit`, layers, hosts, files."""

import functools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import replicas
from tests.support import seeds
from tests.support import training
from tf_xshard import testing

O = keras.optimizers  # noqa: E741


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
        keras.layers.BatchNormalization(),
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
    if layers is _images:
        x = rng.normal(size=(NUM_ROWS, 8, 8, 1)).astype("float32")
    else:
        x = rng.integers(0, 11, size=(NUM_ROWS, 5))
    return x, rng.normal(size=(NUM_ROWS, 2)).astype("float32")


def _model(layers, **compile_options):
    seeds.seed(3)
    model = keras.Sequential([*layers(), keras.layers.Dense(2)])
    rate = O.schedules.ExponentialDecay(0.05, 2, 0.5)
    optimizer = O.SGD(rate, momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"], **compile_options)
    return model


@functools.cache
def _fitted(kind, layers, **compile_options):
    """Two epochs of two batches of 12 and a ragged one, 4 rows.

    Returns:
      The weights of every replica, and what `fit`, `evaluate` and `predict`
      return.
    """
    x, y = _data(layers)
    strategy = replicas.STRATEGIES[kind](2)
    with strategy.scope():
        model = _model(layers, **compile_options)
    history = model.fit(
        x, y, batch_size=12, epochs=2, shuffle=False, verbose=0
    ).history
    weights = [replicas.values(strategy, v) for v in model.weights]
    evaluated = model.evaluate(x, y, batch_size=12, verbose=0)
    return weights, history, evaluated, model.predict(x, 12, verbose=0)


def _check_weights(layers, got, expected):
    largest = max(
        float(np.abs(own - other).max())
        for mine, theirs in zip(got, expected, strict=True)
        for own, other in zip(mine, theirs, strict=True)
    )
    assert largest <= 2e-6
    [first, *_] = _model(layers).get_weights()
    assert np.abs(got[0][0] - first).max() > 1e-3
    return largest


@pytest.mark.parametrize(
    "layers, kind", [(_images, "tpu"), (_sequences, "tpu_permuted")]
)
def test_plain_keras_equals_mirrored_strategy(layers, kind, report):
    """With a ragged last batch, and metrics; `evaluate` and `predict`, too."""
    got, expected = _fitted(kind, layers), _fitted("mirrored", layers)
    largest = _check_weights(layers, got[0], expected[0])
    report(f"plain Keras on {kind}: from MirroredStrategy {largest:.1e}")
    for key, values in expected[1].items():
        np.testing.assert_allclose(got[1][key], values, rtol=1e-5)
    np.testing.assert_allclose(got[2], expected[2], rtol=1e-5)
    np.testing.assert_allclose(got[3], expected[3], atol=1e-5)


def test_steps_per_execution():
    got = _fitted("tpu", _images, steps_per_execution=3)[0]
    _check_weights(_images, got, _fitted("tpu", _images)[0])


def test_dropout_masks_differ_from_step_to_step():
    """And are equal on all replicas, as Keras makes them."""
    strategy = replicas.tpu(4)
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=1)
        layer(tf.ones([1, 64]), training=True)

    @tf.function(autograph=False)
    def step():
        return strategy.run(lambda: layer(tf.ones([1, 64]), training=True))

    first, second = (
        [v.numpy() for v in strategy.experimental_local_results(step())]
        for _ in range(2)
    )
    assert set(np.unique(first[0])) == {0.0, 2.0}
    assert (first[0] != second[0]).any()
    for r in range(4):
        np.testing.assert_array_equal(first[r], first[0])
        np.testing.assert_array_equal(second[r], second[0])


def test_mixed_bfloat16():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    x, _ = training.data()
    with replicas.tpu(4).scope():
        model = training.model()
        model.compile(O.SGD(0.05, momentum=0.9), "mse")
    assert model.layers[0].compute_dtype == "bfloat16"
    losses = model.fit(x, x[:, :1], 64, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data")
def test_custom_loop_over_a_distributed_dataset():
    """The loop is in the graph."""
    strategy = replicas.tpu(4)
    x, y = training.data(64)
    with strategy.scope():
        model = training.model()
        optimizer = O.SGD(0.1)
        optimizer.build(model.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)

    def on_replica(x, y):
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(model(x) - y), axis=-1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=16)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    @tf.function
    def epoch(batches):
        total = 0.0
        for x, y in batches:
            losses = strategy.run(on_replica, args=(x, y))
            total += strategy.reduce("SUM", losses, axis=None)
        return total

    assert epoch(strategy.experimental_distribute_dataset(dataset)) > 0
    reference = training.train(
        lambda: O.SGD(0.1), xy=(x, y), batch_size=16, num_steps=4
    )[1]
    got = training.weights(model, strategy)
    assert training.deviation(got, reference) <= 1e-6


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


def test_fit_on_several_hosts_is_one_device():
    reference = training.train(lambda: O.SGD(0.05))[1]
    strategy = testing.simulated_tpu_strategy(
        4, num_hosts=2, device_assignment=False
    )
    got = training.train(lambda: O.SGD(0.05), strategy, fit=True)[1]
    assert training.deviation(got, reference) <= 1e-6


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_other_numbers_of_replicas(num_replicas):
    options = dict(xy=training.data(48 * 4), batch_size=48)
    reference = training.train(lambda: O.SGD(0.05), **options)[1]
    got = training.train(
        lambda: O.SGD(0.05), replicas.tpu(num_replicas), **options
    )[1]
    assert training.deviation(got, reference) <= 1e-6


def test_checkpoints_and_files(tmp_path):
    strategy = replicas.tpu(4)
    model, _ = training.train(
        lambda: O.SGD(0.05, momentum=0.9), strategy, num_steps=3
    )
    kept = model.get_weights()
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(os.path.join(tmp_path, "checkpoint"))
    file = os.path.join(tmp_path, "model.keras")
    model.save(file)
    batches = [training.data(64)] * 4
    training.run_steps(model, batches)
    assert np.abs(model.get_weights()[0] - kept[0]).max() > 1e-4
    checkpoint.restore(path).assert_consumed()
    with strategy.scope():
        loaded = keras.saving.load_model(file)
    for restored in (model, loaded):
        for mine, theirs in zip(restored.get_weights(), kept, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert restored.optimizer.iterations.numpy() == 3
        training.run_steps(restored, batches)
    for mine, theirs in zip(
        model.get_weights(), loaded.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
