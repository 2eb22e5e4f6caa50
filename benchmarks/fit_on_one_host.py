"""Claim: on one host, `fit` in one process takes 0.6 to 0.9 of Horovod's time.

What a user would choose between for four devices of one machine: one process
with four devices under MirroredStrategy, four processes with one device each
under Horovod, or four processes of `launch` or of `mpiexec`. The same Keras
model, weights, data, batch and Adam; whole steps of `fit`. Each is a run of its
own, one after the other, several times:
`python -m benchmarks.fit_on_one_host --horovod_python=.../bin/python`.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags
from absl import logging

import tf_xshard
from benchmarks import fit_model
from benchmarks import horovod_run
from benchmarks import measuring
from tests.support import mpiexec
from tf_xshard.cli import logical_devices

_RUNS = flags.DEFINE_integer("runs", 3, "runs of each", 2)
_EPOCHS = flags.DEFINE_integer("epochs", 4, "of 20 steps; one is warm-up", 3)
_HOROVOD_PYTHON = flags.DEFINE_string(
    "horovod_python", None, "Python of an environment that has Horovod"
)
_TIMEOUT_SECONDS = flags.DEFINE_integer(
    "timeout_seconds", 600, "ends a run that hangs"
)
_MODELS = flags.DEFINE_list("models", list(fit_model.LAYERS), "which to train")
_SIDE = flags.DEFINE_string("side", None, "for the program's own use")
_MODEL = flags.DEFINE_string("model", None, "for the program's own use")

HOROVOD = "Horovod, four processes"
ONE_PROCESS = "ours, one process"
SHARDED = "ours, one process, shard_update=True"
FOUR_PROCESSES = "ours, four processes"
OVER_MPI = "ours, four processes over MPI"
OURS = (ONE_PROCESS, SHARDED, FOUR_PROCESSES, OVER_MPI)


def _train(name, side):
    """Our side, in a process of its own."""
    is_one_process = side in (ONE_PROCESS, SHARDED)
    if not is_one_process:
        tf_xshard.connect()
    tf.get_logger().setLevel("ERROR")
    logging.set_verbosity(logging.ERROR)
    if is_one_process:
        strategy = tf.distribute.MirroredStrategy(
            logical_devices.use_logical_cpus(fit_model.NUM_REPLICAS)
        )
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = fit_model.model(
            name,
            tf_xshard.CrossShardOptimizer(
                keras.optimizers.Adam(1e-4), shard_update=side == SHARDED
            ),
        )
    data = fit_model.examples(name).batch(
        fit_model.BATCH_SIZE * fit_model.NUM_REPLICAS, drop_remainder=True
    )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    callbacks = [fit_model.StepSeconds(tf_xshard.is_chief(strategy))]
    if is_one_process:
        # tf.data's threads that tune buffers end after up to a minute.
        callbacks.append(
            keras.callbacks.LambdaCallback(on_train_end=lambda _: os._exit(0))
        )
    works = (
        contextlib.nullcontext if is_one_process else tf_xshard.multi_worker_fit
    )
    with works():
        model.fit(
            data.with_options(options),
            epochs=_EPOCHS.value,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )


def _command(side, name):
    if side == HOROVOD:
        return horovod_run.command(
            _HOROVOD_PYTHON.value,
            fit_model.NUM_REPLICAS,
            "horovod_fit.py",
            [name, str(_EPOCHS.value)],
        )
    if side == OVER_MPI:
        return mpiexec.command(
            fit_model.NUM_REPLICAS,
            "benchmarks.fit_on_one_host",
            *(f"--side={side}", f"--model={name}"),
            f"--epochs={_EPOCHS.value}",
        )
    launch = ["tf_xshard", "launch", f"--workers={fit_model.NUM_REPLICAS}"]
    return [
        *(sys.executable, "-m"),
        *([*launch, "-m"] if side == FOUR_PROCESSES else []),
        *("benchmarks.fit_on_one_host", f"--side={side}", f"--model={name}"),
        f"--epochs={_EPOCHS.value}",
    ]


def _run(side, name):
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if side == HOROVOD:
        variables = horovod_run.environment(_HOROVOD_PYTHON.value)
    _, found = horovod_run.printed(
        _command(side, name), "measured", variables, _TIMEOUT_SECONDS.value
    )
    return found


def _print_report(name, seconds):
    base = seconds[HOROVOD]
    middle = statistics.median(base)
    print(
        f"{name}: {HOROVOD}: {middle:.3f} s a step; its runs"
        f" {min(base) / middle:.2f} to {max(base) / middle:.2f} of that"
    )
    for side in OURS:
        ratios = [s / b for s, b in zip(seconds[side], base, strict=True)]
        print(
            f"{name}: {side}: {statistics.median(seconds[side]):.3f} s; ratio"
            f" {statistics.median(ratios):.2f} ({min(ratios):.2f} to"
            f" {max(ratios):.2f})"
        )


def main(argv):
    del argv
    if _SIDE.value:
        _train(_MODEL.value, _SIDE.value)
        return
    if not _HOROVOD_PYTHON.value:
        sys.exit(
            "--horovod_python is missing: without Horovod there is nothing to "
            "compare with. See benchmarks/README.md."
        )
    measuring.print_setting(f"four replicas, {os.cpu_count()} cores")
    for name in _MODELS.value:
        seconds = {side: [] for side in (HOROVOD, *OURS)}
        losses = []
        for _ in range(_RUNS.value):
            for side, results in seconds.items():
                measured = _run(side, name)
                results.append(statistics.median(measured["seconds"]))
                losses.append(measured["losses"])
                print(".", end="", flush=True)
        print()
        # All have trained the same.
        for other in losses[1:]:
            np.testing.assert_allclose(other, losses[0], rtol=1e-3)
        _print_report(name, seconds)


if __name__ == "__main__":
    app.run(main)
