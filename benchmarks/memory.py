"""Claim: with shard_update=True a process needs much less memory.

Trains 50 million parameters with Adam on logical CPUs in a process for each
variant, and compares their peak resident memory: `python -m benchmarks.memory`.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import keras
import tensorflow as tf
from absl import app
from absl import flags

import tf_xshard
from benchmarks import measuring
from benchmarks import step_time
from tf_xshard.cli import logical_devices

# With --replicas of benchmarks.step_time.
_MODEL = flags.DEFINE_enum(
    "model", "adam_50m", list(step_time.MODELS), "of benchmarks.step_time"
)
_STEPS = flags.DEFINE_integer("steps", 5, "steps to train")
_VARIANT = flags.DEFINE_string("variant", None, "the only one to run; no ratio")

IDENTITY = "shard_update=True and post_reduce"
VARIANTS = (
    step_time.BASELINE,
    step_time.AGAIN,
    step_time.OURS,
    step_time.SHARDED,
    IDENTITY,
)


def _optimizer(variant, inner):
    if variant in (step_time.BASELINE, step_time.AGAIN):
        return inner
    return tf_xshard.CrossShardOptimizer(
        inner,
        shard_update=variant != step_time.OURS,
        # A hook that changes nothing, but sees whole gradients.
        post_reduce=list if variant == IDENTITY else None,
    )


def _peak(variant):
    """Trains, and prints this process's peak resident memory in MB."""
    devices = logical_devices.use_logical_cpus(flags.FLAGS.replicas)
    strategy = tf.distribute.MirroredStrategy(devices)
    model_fn, optimizer_fn, rows, _ = step_time.MODELS[_MODEL.value]
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = model_fn()
        model.compile(_optimizer(variant, optimizer_fn()), "mse")
        model.optimizer.build(model.trainable_variables)
    x, y = step_time.batch(model, rows * strategy.num_replicas_in_sync)
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat()
    model.fit(dataset, steps_per_epoch=_STEPS.value, verbose=0)
    # KiB on Linux.
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main(argv):
    del argv
    if _VARIANT.value:
        _peak(_VARIANT.value)
        return
    measuring.print_setting(
        f"{flags.FLAGS.replicas} logical CPUs, {_MODEL.value}, one process each"
    )
    peaks = {}
    for variant in VARIANTS:
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.memory",
                f"--variant={variant}",
                f"--replicas={flags.FLAGS.replicas}",
                f"--model={_MODEL.value}",
                f"--steps={_STEPS.value}",
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            check=True,
        )
        peaks[variant] = float(run.stdout.split()[-1])
        ratio = peaks[variant] / peaks[step_time.BASELINE]
        print(
            f"  {variant:33} {peaks[variant]:6.0f} MB, {ratio:.3f} of plain"
            " Keras",
            flush=True,
        )


if __name__ == "__main__":
    app.run(main)
