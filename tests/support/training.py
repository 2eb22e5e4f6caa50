"""Training on one device and under a strategy, from the same start."""

import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf

from tests.support import replicas

BATCH_SIZE = 64
NUM_STEPS = 20


def data(num_rows=BATCH_SIZE * 4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, 8)).astype("float32")
    y = (np.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3]).astype("float32")
    return x, y


def model(seed=1):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )


def train(
    optimizer_fn,
    strategy=None,
    xy=None,
    batch_size=BATCH_SIZE,
    num_steps=NUM_STEPS,
    model_fn=model,
    **compile_options,
):
    """`fit`s a model; the optimizer is built eagerly, before the first step.

    Returns:
      The model and the weights of every replica: `weights[variable][replica]`.
    """
    x, y = data() if xy is None else xy
    with strategy.scope() if strategy else contextlib.nullcontext():
        trained = model_fn()
        trained.compile(
            optimizer=optimizer_fn(),
            loss=keras.losses.MeanSquaredError(),
            **compile_options,
        )
        trained.optimizer.build(trained.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
    trained.fit(
        dataset.repeat(),
        shuffle=False,
        steps_per_epoch=num_steps,
        verbose=0,
    )
    return trained, weights(trained, strategy)


@functools.cache
def alone(optimizer_fn, num_steps=NUM_STEPS):
    """The weights of one device, trained once for all tests."""
    return train(optimizer_fn, num_steps=num_steps)[1]


def weights(trained, strategy=None):
    return [replicas.values(strategy, v) for v in trained.trainable_variables]


def deviation(got, reference, replica_ids=None) -> float:
    """The largest |difference| of any replica's weights from a reference's."""
    for reference_values in reference:
        assert np.isfinite(reference_values[0]).all()
    largest = 0.0
    for mine, theirs in zip(got, reference, strict=True):
        for r in range(len(mine)) if replica_ids is None else replica_ids:
            difference = np.abs(
                mine[r].astype("float64") - theirs[0].astype("float64")
            )
            if not np.isfinite(difference).all():
                return float("inf")
            largest = max(largest, float(difference.max()))
    return largest


def initial(model_fn=model):
    return weights(model_fn())


def shard_rows(num_rows, batch_size, num_replicas, members):
    """The rows that the replicas of one group see, in order."""
    per_replica = batch_size // num_replicas
    return np.concatenate(
        [
            np.arange(per_replica) + start + r * per_replica
            for start in range(0, num_rows, batch_size)
            for r in members
        ]
    )
