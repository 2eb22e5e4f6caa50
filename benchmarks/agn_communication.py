"""Claim: normalized accumulations train at every period, plain sums do not.

The demo's classifier on 1,797 real digits, eight replicas. The workers'
accumulations are summed, as in the paper (arXiv 1710.02368) and in TF1:
AGNOptimizer with an exchange every 1 to 40 steps, the same without
normalization, and synchronous training; also local SGD, which averages the
models. Several seeds; validation accuracy, exchanges, bytes and a plot:
`python -m benchmarks.agn_communication`.
"""

from __future__ import annotations

import dataclasses
import os
import statistics

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags
from absl import logging

import tf_xshard
from benchmarks import measuring
from tests.support import counting
from tf_xshard.cli import logical_devices
from tf_xshard.cli.demo import digits as digits_lib

_REPLICAS = flags.DEFINE_integer("replicas", 8, "replicas", 2)
_EPOCHS = flags.DEFINE_integer("epochs", 20, "epochs of 22 steps", 2)
_SEEDS = flags.DEFINE_integer("seeds", 2, "seeds of data and weights", 1)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate",
    0.05,
    "SGD's; local SGD's workers, which are averaged, use this times the number"
    " of replicas",
)
_PLOT = flags.DEFINE_string(
    "plot",
    os.path.join(os.path.dirname(__file__), "agn_communication.png"),
    "the plot's file",
)

VALIDATION_FREQUENCY = 2  # Epochs.
PERIODS = (1, 5, 10, 20, 40)
SYNCHRONOUS = "synchronous"
AGN, SUMS, LOCAL_SGD = "AGN", "not normalized", "local SGD"


def _synchronous():
    return tf_xshard.CrossShardOptimizer(
        keras.optimizers.SGD(_LEARNING_RATE.value), reduction="sum"
    )


def _agn(period, normalize=True):
    return tf_xshard.AGNOptimizer(
        keras.optimizers.SGD(_LEARNING_RATE.value),
        communication_period=period,
        reduction="sum",
        normalize=normalize,
    )


def _sums(period):
    return _agn(period, normalize=False)


def _local_sgd(period):
    return tf_xshard.AGNOptimizer(
        keras.optimizers.SGD(1.0),
        local_optimizer=keras.optimizers.SGD(
            _LEARNING_RATE.value
            * tf.distribute.get_strategy().num_replicas_in_sync
        ),
        communication_period=period,
        accumulate="updates",
        normalize=False,
    )


METHODS = {AGN: _agn, SUMS: _sums, LOCAL_SGD: _local_sgd}


@dataclasses.dataclass
class _Run:
    """Accuracy every other epoch; group sums and their bytes, per replica."""

    accuracies: list[float]
    num_sums: int
    num_bytes: int


def _train(strategy, digits, make_optimizer, seed) -> _Run:
    with counting.group_sums(strategy) as counted:
        with strategy.scope():
            model = digits_lib.create_model(seed)
            optimizer = make_optimizer()
            digits_lib.compiled(model, optimizer)
            optimizer.build(model.trainable_variables)
        is_agn = isinstance(optimizer, tf_xshard.AGNOptimizer)
        dataset = tf.data.Dataset.from_tensor_slices((digits.x, digits.y))
        # Keras can't begin with a batch that replicas can't share evenly.
        rows = len(digits.x_validation)
        rows -= rows % strategy.num_replicas_in_sync
        validation = tf.data.Dataset.from_tensors(
            (digits.x_validation[:rows], digits.y_validation[:rows])
        )
        history = model.fit(
            dataset.batch(digits.batch_size, drop_remainder=True),
            epochs=_EPOCHS.value,
            steps_per_epoch=digits.steps_per_epoch,
            validation_data=validation,
            validation_freq=VALIDATION_FREQUENCY,
            shuffle=False,
            verbose=0,
            callbacks=[tf_xshard.SwapCenterWeights()] if is_agn else [],
        )
        [(num_sums, num_bytes), *_] = counted()
    return _Run(history.history["val_accuracy"], num_sums, num_bytes)


def _print_table(runs) -> None:
    baseline = runs[SYNCHRONOUS, 1]
    print(
        f"\n{'method':15} {'period':>6} {'exchanges':>9} {'MB':>7}"
        f" {'synchronous / MB':>16}  accuracy, median (least to most)"
    )
    for (method, period), of_seeds in runs.items():
        final = [run.accuracies[-1] for run in of_seeds]
        handed_in = of_seeds[0].num_bytes
        print(
            f"{method:15} {period:6} {of_seeds[0].num_sums:9}"
            f" {handed_in / 1e6:7.2f}"
            f" {baseline[0].num_bytes / handed_in:16.1f} "
            f" {statistics.median(final):.3f} ({min(final):.3f} to"
            f" {max(final):.3f})"
        )


def _plot(runs, path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def median(of_seeds):
        return np.median([run.accuracies for run in of_seeds], axis=0)

    figure, panels = pyplot.subplots(
        1, len(METHODS), figsize=(11, 3.8), sharey=True
    )
    epochs = range(
        VALIDATION_FREQUENCY, _EPOCHS.value + 1, VALIDATION_FREQUENCY
    )
    colors = pyplot.get_cmap("viridis")(np.linspace(0, 0.9, len(PERIODS)))
    for axes, method in zip(panels, METHODS, strict=True):
        axes.plot(
            epochs,
            median(runs[SYNCHRONOUS, 1]),
            color="black",
            linestyle="--",
            label=SYNCHRONOUS,
        )
        for period, color in zip(PERIODS, colors, strict=True):
            axes.plot(
                epochs,
                median(runs[method, period]),
                color=color,
                label=f"every {period} steps",
            )
        axes.set(title=method, xlabel="epoch", ylim=(0, 1))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("validation accuracy of the center")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
    print(f"\nThe curves are in {path}")


def main(argv):
    del argv
    strategy = logical_devices.best_strategy(_REPLICAS.value)
    measuring.print_setting(logical_devices.describe(strategy))
    logging.set_verbosity(logging.ERROR)  # Each name of a collective.
    variants = {(SYNCHRONOUS, 1): _synchronous}
    for method, make in METHODS.items():
        for period in PERIODS:
            variants[method, period] = lambda m=make, p=period: m(p)
    runs = {variant: [] for variant in variants}
    for seed in range(_SEEDS.value):
        digits = digits_lib.load(_EPOCHS.value, seed)
        for variant, make in variants.items():
            runs[variant].append(_train(strategy, digits, make, seed))
            print(".", end="", flush=True)
    _print_table(runs)
    _plot(runs, _PLOT.value)


if __name__ == "__main__":
    app.run(main)
