"""`fit` over several processes: what each process of the cluster runs.

multi_worker/four_processes_test.py compares it with one device.
"""

import keras
import numpy as np

import tf_xshard
from tests.support import seeds
from tests.support import training

CROSSED = [[0, 2], [1, 3]]
NUM_STEPS = 8
NUM_ROWS = 50  # Of the ragged data, which four workers can't share evenly.
CLASS_WEIGHT = {0: 0.5, 1: 2.0}


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)


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


def fit_classifier(strategy, optimizer=None, **options):
    """Metrics, class weights, ragged batches, ragged validation data."""
    x, y = training.data(NUM_ROWS)
    y = (y[:, 0] > 0).astype("int32")
    with strategy.scope():
        model = classifier()
        model.compile(
            optimizer=optimizer or tf_xshard.CrossShardOptimizer(sgd()),
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


def sgd():
    return keras.optimizers.SGD(0.05)


def _crossed(strategy):
    model, _ = training.train(
        lambda: tf_xshard.CrossShardOptimizer(
            momentum(), group_assignment=CROSSED
        ),
        strategy,
        num_steps=NUM_STEPS,
        fit=True,
    )
    return [np.float64(v.numpy()).tolist() for v in model.trainable_variables]


def _plain_keras(strategy):
    """What plain Keras says."""
    try:
        fit_classifier(strategy, sgd())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run(strategy, full):
    result = {"plain": full and _plain_keras(strategy)}
    with tf_xshard.multi_worker_fit():
        result["crossed"] = _crossed(strategy)
        for name, steps in (("classifier", 1), ("in_twos", 2)):
            result[name] = full and fit_classifier(
                strategy, steps_per_execution=steps
            )
    return result
