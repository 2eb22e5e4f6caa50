"""Keras on the simulated TPU: `fit`, layers, hosts, files."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import fitting
from tests.support import replicas
from tests.support import training
from tf_xshard import testing


def _model():
    model = training.model()
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def test_plain_keras_equals_one_device():
    """`fit` with a short last batch, `evaluate` and `predict` on odd ones."""
    x, y = training.data(16)
    single, strategy = _model(), replicas.tpu(2)
    start = single.get_weights()
    with strategy.scope():
        model = _model()
    # An odd number of rows, of which one replica has more.
    rows = fitting.batches(x[:-1], y[:-1], 12)
    history, expected = (
        fitting.fit(one, [], 1, (x, y), 12, validation_data=rows)
        for one in (model, single)
    )
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5)
    for variable, value, before in zip(
        model.weights, single.get_weights(), start, strict=True
    ):
        for own in replicas.values(strategy, variable):
            np.testing.assert_allclose(own, value, atol=2e-6)
        assert np.abs(value - before).max() > 1e-4
    predicted = model.predict(rows, verbose=0)
    np.testing.assert_allclose(predicted, single(x[:-1]), atol=1e-5)


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

    def on_replica():
        x = tf.fill([2, 64], replicas.power_of_ten())
        normalization(x, training=True)
        # Not a number of bfloat16.
        return dropout(tf.ones([64]), training=True), dense(x + 0.01)

    step = tf.function(lambda: strategy.run(on_replica), autograph=False)
    masks = []
    for _ in range(2):
        results = [strategy.experimental_local_results(one) for one in step()]
        first, second = (one.numpy() for one in results[0])
        np.testing.assert_array_equal(first, second)
        assert set(np.unique(first)) == {0.0, 2.0}
        masks.append(first)
    assert (masks[0] != masks[1]).any()
    means = replicas.values(strategy, normalization.moving_mean)
    for r, (mean, product) in enumerate(zip(means, results[1], strict=True)):
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
    all_reduce = lambda x: tf.distribute.get_replica_context().all_reduce(
        "SUM", x
    )
    step = tf.function(
        lambda x: strategy.run(lambda x: (x, all_reduce(x)), args=(x,))
    )
    for shift in (0, 2):
        own, total = step(next(iterator))
        own = [float(v[0]) for v in strategy.experimental_local_results(own)]
        expected = [100 * h + shift + k for h in range(4) for k in range(2)]
        assert own == expected
        for value in strategy.experimental_local_results(total):
            assert float(value[0]) == sum(expected)
    assert pipelines == [0, 1, 2, 3]
