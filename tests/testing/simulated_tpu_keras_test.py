"""Keras on the simulated TPU: `fit`, layers, hosts, files."""

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


LAYERS = {
    "dense": ((8,), lambda: [keras.layers.Dense(6, activation="relu")]),
    "embedding": (
        (5,),
        lambda: [keras.layers.Embedding(11, 4), keras.layers.Flatten()],
    ),
    "convolution": (
        (8, 8, 1),
        lambda: [
            keras.layers.Conv2D(3, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
        ],
    ),
    "recurrent": ((5, 3), lambda: [keras.layers.SimpleRNN(4)]),
    "attention": (
        (12, 8),
        lambda: [_Attention(), keras.layers.GlobalAveragePooling1D()],
    ),
    "normalization": (
        (8,),
        lambda: [keras.layers.Dense(6), keras.layers.BatchNormalization()],
    ),
}


class _Attention(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 4, seed=1)

    def call(self, x):
        return self.attention(x, x, use_causal_mask=True)


def _keras_data(name, num_rows):
    shape, _ = LAYERS[name]
    rng = np.random.default_rng(0)
    if name == "embedding":
        x = rng.integers(0, 11, size=(num_rows, *shape))
    else:
        x = rng.normal(size=(num_rows, *shape)).astype("float32")
    return x, rng.normal(size=(num_rows, 2)).astype("float32")


def _keras_model(name, optimizer, **compile_options):
    shape, layers = LAYERS[name]
    seeds.seed(3)
    dtype = "int32" if name == "embedding" else "float32"
    model = keras.Sequential(
        [
            keras.layers.Input(shape, dtype=dtype),
            *layers(),
            keras.layers.Dense(2),
        ]
    )
    model.compile(
        optimizer=optimizer,
        loss="mse",
        metrics=["mae"],
        **compile_options,
    )
    return model


def _fit(
    strategy, name, optimizer_fn, num_rows=28, fit_only=False, **compile_options
):
    """Two epochs of two batches of 12 and a ragged one, 4 rows."""
    x, y = _keras_data(name, num_rows)
    with strategy.scope():
        model = _keras_model(name, optimizer_fn(), **compile_options)
    history = model.fit(
        x, y, batch_size=12, epochs=2, shuffle=False, verbose=0
    ).history
    if fit_only:
        return model, history, None, None
    evaluated = model.evaluate(x, y, batch_size=12, verbose=0)
    predicted = model.predict(x, batch_size=12, verbose=0)
    return model, history, evaluated, predicted


@pytest.mark.parametrize("name, kind", replicas.in_turn(LAYERS, replicas.TPUS))
def test_plain_keras_equals_mirrored_strategy(name, kind, report):
    """`fit` with a ragged last batch, and metrics.

    Also `evaluate` and `predict`, once for each numbering of the replicas.
    """

    def optimizer():
        return O.SGD(O.schedules.ExponentialDecay(0.05, 2, 0.5), momentum=0.9)

    strategies = (replicas.mirrored(2), replicas.STRATEGIES[kind](2))
    fit_only = name not in ("normalization", "convolution")
    reference = _fit(strategies[0], name, optimizer, fit_only=fit_only)
    got = _fit(strategies[1], name, optimizer, fit_only=fit_only)
    largest = 0.0
    for mine, theirs in zip(got[0].weights, reference[0].weights, strict=True):
        for own, other in zip(
            replicas.values(strategies[1], mine),
            replicas.values(strategies[0], theirs),
            strict=True,
        ):
            largest = max(largest, float(np.abs(own - other).max()))
    for key, values in reference[1].items():
        np.testing.assert_allclose(got[1][key], values, rtol=1e-5)
    if not fit_only:
        np.testing.assert_allclose(got[2], reference[2], rtol=1e-5)
        np.testing.assert_allclose(got[3], reference[3], atol=1e-5)
    report(f"plain Keras, {name}, {kind}: from MirroredStrategy {largest:.1e}")
    assert largest <= 2e-6
    first = _keras_model(name, "sgd").get_weights()
    assert np.abs(got[0].get_weights()[0] - first[0]).max() > 1e-3


def test_steps_per_execution():
    def optimizer():
        return O.SGD(0.05, momentum=0.9)

    strategy = replicas.tpu(2)
    reference = _fit(strategy, "dense", optimizer)
    got = _fit(
        strategy,
        "dense",
        optimizer,
        steps_per_execution=3,
    )
    assert got[0].optimizer.iterations == reference[0].optimizer.iterations
    for mine, theirs in zip(
        got[0].get_weights(), reference[0].get_weights(), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


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
    x, _ = training.data(256)
    y = x[:, :1] * 2.0
    with replicas.tpu(4).scope():
        model = keras.Sequential(
            [
                keras.layers.Input((8,)),
                keras.layers.Dense(32, activation="relu"),
                keras.layers.Dropout(0.25),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        model.compile(optimizer=O.SGD(0.05, momentum=0.9), loss="mse")
    assert model.layers[0].compute_dtype == "bfloat16"
    losses = model.fit(x, y, batch_size=64, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data")
def test_custom_loop_over_a_distributed_dataset():
    """The loop is in the graph; the last batch is ragged."""
    strategy = replicas.tpu(4)
    x, y = training.data(60)
    with strategy.scope():
        model = training.model()
        optimizer = O.SGD(0.1)
        optimizer.build(model.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    distributed = strategy.experimental_distribute_dataset(dataset)

    @tf.function
    def epoch(batches):
        total = 0.0
        for x, y in batches:

            def on_replica(x, y):
                with tf.GradientTape() as tape:
                    errors = tf.square(model(x) - y)
                    loss = tf.nn.compute_average_loss(
                        tf.reduce_mean(errors, axis=-1), global_batch_size=16
                    )
                optimizer.apply(
                    tape.gradient(loss, model.trainable_variables),
                    model.trainable_variables,
                )
                return loss

            per_replica = strategy.run(on_replica, args=(x, y))
            total += strategy.reduce("SUM", per_replica, axis=None)
        return total

    got = float(epoch(distributed))
    one = training.model()
    plain = O.SGD(0.1)
    total = 0.0
    for x, y in dataset:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(one(x) - y)) / 16
        plain.apply(
            tape.gradient(loss, [v.value for v in one.trainable_variables]),
            one.trainable_variables,
        )
        total += float(loss)
    assert got == pytest.approx(total, rel=1e-5)
    assert (
        training.deviation(
            training.weights(model, strategy), training.weights(one)
        )
        <= 1e-6
    )


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
    for device_assignment in (True, False):
        strategy = testing.simulated_tpu_strategy(
            4, num_hosts=2, device_assignment=device_assignment
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
    x, y = training.data()
    model.fit(x, y, batch_size=64, verbose=0)
    assert np.abs(model.get_weights()[0] - kept[0]).max() > 1e-4
    checkpoint.restore(path).assert_consumed()
    with strategy.scope():
        loaded = keras.saving.load_model(file)
    for restored in (model, loaded):
        for mine, theirs in zip(restored.get_weights(), kept, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert restored.optimizer.iterations.numpy() == 3
        restored.fit(x, y, batch_size=64, shuffle=False, verbose=0)
    for mine, theirs in zip(
        model.get_weights(), loaded.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
