"""Claim: over processes a step with shard_update=True takes no longer.

Four processes on one machine under MultiWorkerMirroredStrategy, one group, an
Adam step with given gradients for 27 million parameters: the whole update, the
same again (the noise), and the sharded one, interleaved, with the bytes on the
wire: `python -m benchmarks.sharded_workers`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags
from absl import logging

import tf_xshard
from benchmarks import measuring
from tf_xshard.multi_worker import local_cluster

_BLOCKS = flags.DEFINE_integer("blocks", 9, "interleaved blocks", 5)
_STEPS = flags.DEFINE_integer("steps", 2, "steps a block")
_LAYERS = flags.DEFINE_integer("layers", 42, "of 800 x 800 weights and a bias")
_WORKER = flags.DEFINE_bool("worker", False, "for the program's own use")

NUM_WORKERS = 4
TIMEOUT_SECONDS = 1800
WHOLE, AGAIN, SHARDED = (
    "whole update",
    "whole update again",
    "shard_update=True",
)


def _step(strategy, shapes, shard_update):
    with strategy.scope():
        variables = [keras.Variable(tf.zeros(shape)) for shape in shapes]
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.Adam(), shard_update=shard_update
        )
        optimizer.build(variables)

    @tf.function
    def step():
        def on_replica():
            optimizer.apply([tf.ones(shape) for shape in shapes], variables)
            return variables[0].value[0, 0]

        return strategy.run(on_replica)

    return step


def _worker():
    tf.get_logger().setLevel("ERROR")
    logging.set_verbosity(logging.ERROR)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    shapes = [s for _ in range(_LAYERS.value) for s in ((800, 800), (800,))]
    steps = {
        WHOLE: _step(strategy, shapes, False),
        SHARDED: _step(strategy, shapes, True),
    }
    steps[AGAIN] = steps[WHOLE]

    def timed(name):
        def run():
            seconds = []
            for _ in range(_STEPS.value):
                tf_xshard.barrier(strategy)
                start = time.perf_counter()
                steps[name]().numpy()
                seconds.append(time.perf_counter() - start)
            return seconds

        return run

    for step in steps.values():
        step().numpy()
    medians = measuring.interleaved(
        {name: timed(name) for name in (WHOLE, AGAIN, SHARDED)}, _BLOCKS.value
    )
    sent = {name: _sent(strategy, steps[name]) for name in (WHOLE, SHARDED)}
    if tf_xshard.is_chief(strategy):
        _print_report(medians, sent, shapes)
    sys.stdout.flush()
    tf_xshard.barrier(strategy)
    os._exit(0)


def _sent(strategy, step) -> float:
    """Bytes that all processes together send in a step."""
    tf_xshard.barrier(strategy)
    before = measuring.loopback_bytes()
    for _ in range(_STEPS.value):
        step().numpy()
    tf_xshard.barrier(strategy)
    return (measuring.loopback_bytes() - before) / _STEPS.value


def _print_report(medians, sent, shapes):
    num_bytes = 4 * sum(int(np.prod(shape)) for shape in shapes)
    bound = 2 * (NUM_WORKERS - 1) * num_bytes
    base = measuring.quartiles(medians[WHOLE])[1]
    print(f"{num_bytes / 4e6:.1f} million parameters; {WHOLE} {base:.3f} s")
    for name in (AGAIN, SHARDED):
        low, middle, high = measuring.quartiles(
            measuring.ratios(medians, name, WHOLE)
        )
        print(
            f"  {name:18} / {WHOLE}: {middle:.3f} (quartiles {low:.3f} to"
            f" {high:.3f})"
        )
    for name, number in sent.items():
        print(f"  {name:18} sends {number / bound:.3f} of a ring's bytes")


def main(argv):
    del argv
    if _WORKER.value:
        _worker()
        return
    measuring.print_setting(f"{NUM_WORKERS} processes on one machine")
    nowhere = subprocess.DEVNULL
    processes = local_cluster.start(
        [
            "-m",
            "benchmarks.sharded_workers",
            "--worker",
            f"--blocks={_BLOCKS.value}",
            f"--steps={_STEPS.value}",
            f"--layers={_LAYERS.value}",
        ],
        [(None, None)] + [(nowhere, nowhere)] * (NUM_WORKERS - 1),
        {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    try:
        codes = [process.wait(TIMEOUT_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        sys.exit(f"workers ended with {codes}")


if __name__ == "__main__":
    app.run(main)
