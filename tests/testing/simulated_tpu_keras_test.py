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


def _total(x):
    return tf.distribute.get_replica_context().all_reduce("SUM", x)


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

    def on_replica():
        x = tf.fill([2, 64], replicas.power_of_ten())
        normalization(x, training=True)
        return dropout(tf.ones([64]), training=True)

    step = tf.function(lambda: strategy.run(on_replica), autograph=False)
    steps = [strategy.experimental_local_results(step()) for _ in range(2)]
    masks = np.array(steps)
    np.testing.assert_array_equal(masks[:, 0], masks[:, 1])
    assert (masks[0] != masks[1]).any()
    assert set(np.unique(masks)) == {0.0, 2.0}
    means = replicas.values(strategy, normalization.moving_mean)
    for r, mean in enumerate(means):
        np.testing.assert_allclose(mean, np.full(64, 0.75 * 10**r))


@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data")
def test_custom_loop_over_a_distributed_dataset():
    """The loop is in the graph."""
    strategy = replicas.tpu(2)
    with strategy.scope():
        weight = keras.Variable(0.0)
    rows = tf.data.Dataset.from_tensor_slices(tf.range(8.0))
    dataset = fitting.untuned(rows.batch(4))

    def on_replica(x):
        total = _total(tf.reduce_sum(x) * weight + 1.0)
        weight.assign(total)
        return total

    @tf.function
    def epoch(batches):
        total = 0.0
        for x in batches:
            losses = strategy.run(on_replica, args=(x,))
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
    step = tf.function(lambda x: strategy.run(_total, (x,)))
    firsts = lambda x: [
        float(one[0]) for one in strategy.experimental_local_results(x)
    ]
    for shift in (0, 2):
        batch = next(iterator)
        expected = [100 * h + shift + k for h in range(4) for k in range(2)]
        assert firsts(batch) == expected
        assert firsts(step(batch)) == [sum(expected)] * 8
    assert pipelines == [0, 1, 2, 3]
