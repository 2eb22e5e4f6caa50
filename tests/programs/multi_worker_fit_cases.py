"""`fit` over several processes: what each process of the cluster runs.

multi_worker/four_processes_test.py compares it with one device.
"""

import resource

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tests.support import mutants
from tests.support import seeds
from tests.support import training

GROUPS = {
    "all": None,
    "crossed": [[0, 2], [1, 3]],
}
NUM_ROWS = 50  # Of the ragged data, which four workers can't share evenly.
NUM_ARRAYS = 20  # Of 1 MiB, each with 256 pages.
CLASS_WEIGHT = {0: 0.5, 1: 2.0}


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)


def towers():
    """Two batches of half the size make one update."""
    return tf_xshard.TowerOptimizer(
        tf_xshard.CrossShardOptimizer(momentum()), 2
    )


def local_sgd():
    return tf_xshard.AGNOptimizer(
        keras.optimizers.SGD(1.0),
        local_optimizer=keras.optimizers.SGD(0.05),
        communication_period=5,
        accumulate="updates",
        normalize=False,
    )


def classifier():
    """Two classes, for class weights, and metrics."""
    seeds.seed(1)
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )


def fit_classifier(strategy, optimizer, **options):
    """Metrics, class weights, ragged batches, ragged validation data."""
    x, y = training.data(NUM_ROWS)
    y = (y[:, 0] > 0).astype("int32")
    with strategy.scope():
        model = classifier()
        model.compile(
            optimizer=optimizer(),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
            weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy()],
            **options,
        )
    history = model.fit(
        x,
        y,
        batch_size=20,
        epochs=2,
        shuffle=False,
        verbose=0,
        class_weight=CLASS_WEIGHT,
        validation_data=(x[:33], y[:33]),
    ).history
    evaluated = model.evaluate(x, y, batch_size=20, verbose=0, return_dict=True)
    predicted = model.predict(x, batch_size=20, verbose=0)
    return {
        "history": {k: [float(v) for v in vs] for k, vs in history.items()},
        "evaluate": {k: float(v) for k, v in evaluated.items()},
        "predict": np.float64(predicted).tolist(),
    }


def _weights(strategy, optimizer, **options):
    model = training.train(optimizer, strategy, **options)[0]
    return [np.float64(v.numpy()).tolist() for v in model.trainable_variables]


class _PageFaults(keras.callbacks.Callback):
    """Counts what clearing new memory costs, in `fit`."""

    def on_train_batch_end(self, batch, logs=None):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(NUM_ARRAYS):
            np.ones(1 << 18, np.float32)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self.number = after - before


def fit_shuffled(strategy, seed):
    """How often `fit` has trained on each of 32 rows, in its own order."""
    tf.random.set_seed(seed)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((32,)),
                keras.layers.Dense(
                    1, use_bias=False, kernel_initializer="zeros"
                ),
            ]
        )
        model.compile(
            tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(8.0)),
            loss=lambda y, outputs: -outputs,
        )
    faults = _PageFaults()
    model.fit(
        np.eye(32), np.zeros(32), batch_size=8, verbose=0, callbacks=[faults]
    )
    weights = np.float64(model.get_weights()[0]).ravel().tolist()
    # `fit` leaves the seed as it was.
    after = float(tf.random.uniform([]))
    tf.random.set_seed(seed)
    return weights, faults.number, after == float(tf.random.uniform([]))


def plain_keras(strategy):
    """What plain Keras says."""
    try:
        fit_classifier(strategy, sgd)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def run(strategy):
    """All of it; the mutants are what the comparison must notice."""
    result = {"plain": plain_keras(strategy)}
    with tf_xshard.multi_worker_fit() as active:
        for name, groups in GROUPS.items():
            result[name] = _weights(
                strategy,
                lambda groups=groups: tf_xshard.CrossShardOptimizer(
                    momentum(), group_assignment=groups
                ),
                fit=name == "crossed",
            )
        # The step that `fit` runs, right and wrong.
        result["towers"] = _weights(
            strategy, towers, batch_size=32, num_steps=40
        )
        result["agn"] = _weights(strategy, local_sgd)
        result["sgd"] = _weights(strategy, _cross_shard_sgd)
        for name in ("factor_2", "no_reduction"):
            with mutants.mutant(name):
                result[f"mutant_{name}"] = _weights(strategy, _cross_shard_sgd)
        result["classifier"] = fit_classifier(strategy, _cross_shard_sgd)
        result["in_twos"] = fit_classifier(
            strategy, _cross_shard_sgd, steps_per_execution=2
        )
        # Each process has another seed.
        rank = tf_xshard.rank(strategy)
        result["shuffled"] = fit_shuffled(strategy, rank + 7)
        active.undo()
    return result


def sgd():
    """For the mutants: clipping hides a factor."""
    return keras.optimizers.SGD(0.05)


def _cross_shard_sgd():
    return tf_xshard.CrossShardOptimizer(sgd())
