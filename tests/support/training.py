"""Training on one device and under a strategy, from the same start."""

import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tests.support import filled
from tests.support import replicas
from tests.support import seeds

BATCH_SIZE = 64
NUM_STEPS = 20


def data(num_rows=BATCH_SIZE * 4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, 8)).astype("float32")
    y = (np.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3]).astype("float32")
    return x, y


def model(seed=1):
    seeds.seed(seed)
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
    fit=False,
    **compile_options,
):
    """Trains a model; the optimizer is built eagerly, before the first step.

    Args:
      fit: Whether by `fit`, as with options of `compile`. Otherwise by the step
        that `fit` runs: see `run_steps`.

    Returns:
      The model and the weights of every replica: `weights[variable][replica]`.
    """
    x, y = data() if xy is None else xy
    with strategy.scope() if strategy else contextlib.nullcontext():
        trained = model_fn()
        options = {"loss": keras.losses.MeanSquaredError(), **compile_options}
        trained.compile(optimizer_fn(), **options)
        trained.optimizer.build(trained.trainable_variables)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
    batches = batches.repeat().take(num_steps)
    if fit or compile_options:
        trained.fit(batches, shuffle=False, verbose=0)
    else:
        run_steps(trained, batches.as_numpy_iterator())
    return trained, weights(trained, strategy)


def run_steps(trained, batches):
    """What `fit` runs, in a loop of its own, for batches of equal size.

    `fit` under a strategy makes three iterators, for which TensorFlow traces
    eight functions a replica: most of the time of a small training.
    """
    strategy = trained.distribute_strategy
    step = step_of(trained)
    for batch in batches:
        step(*(distributed(strategy, one) for one in batch))
    trained.optimizer.finalize_variable_values(trained.trainable_variables)


@functools.lru_cache(64)
def step_of(trained):
    """A function of the replicas' parts of a batch."""
    strategy = trained.distribute_strategy
    return tf.function(
        lambda *batch: strategy.run(trained.train_step, (batch,)),
        autograph=False,
        reduce_retracing=True,
    )


def run_parts(trained, steps):
    """Steps in which replica r has `parts[r]`, of any size; their losses.

    Without a trace on one device, where it would take longer than the steps.
    """
    strategy, losses = trained.distribute_strategy, []
    step = step_of(trained)
    if strategy.num_replicas_in_sync == 1:
        step = lambda *batch: trained.train_step(batch)
    for parts in steps:
        batch = tf.nest.map_structure(
            lambda *own: per_replica(strategy, own), *parts
        )
        trained.reset_metrics()
        step(*batch)
        losses.append(float(trained.metrics[0].result()))
    return losses


def joined(parts):
    """The rows of several parts, as one."""
    return tf.nest.map_structure(lambda *own: np.concatenate(own), *parts)


def per_replica(strategy, values):
    """A tensor of each replica's value."""
    return strategy.experimental_distribute_values_from_function(
        lambda replica: tf.constant(values[replica.replica_id_in_sync_group])
    )


def distributed(strategy, rows):
    """Equal parts of a batch, one for each replica."""
    return per_replica(strategy, np.split(rows, strategy.num_replicas_in_sync))


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


def by_keras_file(saved, new, directory):
    """Moves a model's state to another."""
    saved.save(directory / "model.keras")
    new.load_weights(directory / "model.keras")


def by_checkpoint(saved, new, directory):
    """The same with TensorFlow's files."""
    path = filled.checkpoint(saved).write(directory / "checkpoint")
    filled.checkpoint(new).read(path).expect_partial()


def by_group_state(saved, new, directory):
    """The same with the values of all replicas."""
    tf_xshard.GroupState(saved).save(directory)
    tf_xshard.GroupState(new).restore(directory)


MOVES = (by_keras_file, by_group_state, by_checkpoint)
