"""Claim: 8-bit gradients with error feedback learn the digits as float32 does.

The demo's classifier on 1,797 real digits, eight replicas, the same data, start
and learning rate in each row: gradients in float32, bfloat16, 8-bit integers
with error feedback, and without. Several seeds; validation loss and accuracy,
bytes from the CommunicationLedger, and curves:
`python -m benchmarks.quantized_digits`.
"""

from __future__ import annotations

import os

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags
from absl import logging

import tf_xshard
from benchmarks import measuring
from tf_xshard.cli import logical_devices
from tf_xshard.cli.demo import digits as digits_lib

_REPLICAS = flags.DEFINE_integer("replicas", 8, "replicas", 2)
_EPOCHS = flags.DEFINE_integer("epochs", 20, "epochs of 22 steps", 1)
_SEEDS = flags.DEFINE_integer("seeds", 3, "seeds of data and weights", 1)
_PLOT = flags.DEFINE_string(
    "plot",
    os.path.join(os.path.dirname(__file__), "quantized_digits.png"),
    "the plot's file",
)

FLOAT32 = "float32"
WIRES = {
    FLOAT32: dict(),
    "bfloat16": dict(dtype="bfloat16"),
    "int8, error feedback": dict(dtype="int8", error_feedback=True),
    "int8": dict(dtype="int8"),
}


def _train(strategy, digits, communication, seed):
    """The history of one training, with the bytes handed in."""
    with strategy.scope():
        model = digits_lib.create_model(seed)
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9),
            communication=tf_xshard.Communication(**communication),
        )
        digits_lib.compiled(model, optimizer)
        optimizer.build(model.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices((digits.x, digits.y))
    # Keras can't begin with a batch that replicas can't share evenly.
    rows = len(digits.x_validation)
    rows -= rows % strategy.num_replicas_in_sync
    validation = tf.data.Dataset.from_tensors(
        (digits.x_validation[:rows], digits.y_validation[:rows])
    )
    return model.fit(
        dataset.batch(digits.batch_size, drop_remainder=True),
        epochs=_EPOCHS.value,
        steps_per_epoch=digits.steps_per_epoch,
        validation_data=validation,
        shuffle=False,
        verbose=0,
        callbacks=[tf_xshard.CommunicationLedger()],
    ).history


def _print_table(runs):
    print(
        f"\n{'gradients in':22} {'MB sent':>8} {'of float32':>10} "
        f" {'loss':>7}  accuracy, median (least to most)"
    )
    baseline = sum(runs[FLOAT32][0]["communication_bytes_sent"])
    for name, of_seeds in runs.items():
        sent = sum(of_seeds[0]["communication_bytes_sent"])
        final = [one["val_accuracy"][-1] for one in of_seeds]
        loss = np.median([one["val_loss"][-1] for one in of_seeds])
        print(
            f"{name:22} {sent / 1e6:8.2f} {sent / baseline:10.3f}  {loss:7.4f} "
            f" {np.median(final):.3f} ({min(final):.3f} to {max(final):.3f})"
        )
    for name in runs:
        largest = max(
            abs(mine["val_accuracy"][-1] - theirs["val_accuracy"][-1])
            for mine, theirs in zip(runs[name], runs[FLOAT32], strict=True)
        )
        print(
            f"{name}: final accuracy at most {100 * largest:.2f} points from"
            " float32's, of the same seed"
        )


def _plot(runs, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for axes, metric in zip(panels, ("val_loss", "val_accuracy"), strict=True):
        for name, of_seeds in runs.items():
            median = np.median([one[metric] for one in of_seeds], axis=0)
            axes.plot(range(1, len(median) + 1), median, label=name)
        axes.set(xlabel="epoch", ylabel=metric.replace("val_", "validation "))
        axes.grid(alpha=0.3)
    panels[0].set_yscale("log")
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
    runs = {name: [] for name in WIRES}
    for seed in range(_SEEDS.value):
        digits = digits_lib.load(_EPOCHS.value, seed)
        for name, communication in WIRES.items():
            runs[name].append(_train(strategy, digits, communication, seed))
            print(".", end="", flush=True)
    _print_table(runs)
    _plot(runs, _PLOT.value)


if __name__ == "__main__":
    app.run(main)
