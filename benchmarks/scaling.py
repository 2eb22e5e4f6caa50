"""Claim: tracing grows linearly with variables; steps do not with groups.

One process, MirroredStrategy over eight logical CPUs, SGD: seconds to trace and
to run a step, with 10, 100 and 1000 variables in one group, and with 1, 2 and 4
groups of the eight replicas; interleaved, next to plain Keras in the same run:
`python -m benchmarks.scaling`.
"""

from __future__ import annotations

import os
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

import tf_xshard
from benchmarks import measuring
from tf_xshard.cli import logical_devices

_BLOCKS = flags.DEFINE_integer("blocks", 5, "interleaved blocks", 5)
_STEPS = flags.DEFINE_integer("steps", 10, "steps a block")

NUM_REPLICAS = 8
NUM_VARIABLES = (10, 100, 1000)
NUM_GROUPS = (1, 2, 4)
SHAPE = (32, 32)
PLAIN = "plain Keras"


def _optimizer(num_groups):
    inner = keras.optimizers.SGD(1e-3)
    if num_groups is None:
        return inner
    return tf_xshard.CrossShardOptimizer(
        inner,
        group_assignment=tf_xshard.GroupAssignment.contiguous(
            NUM_REPLICAS, NUM_REPLICAS // num_groups
        ),
    )


def _made(strategy, num_variables, num_groups):
    """A traced step and the seconds that tracing took."""
    with strategy.scope():
        variables = [
            keras.Variable(np.zeros(SHAPE, "float32"))
            for _ in range(num_variables)
        ]
        optimizer = _optimizer(num_groups)
        optimizer.build(variables)

    @tf.function
    def step():
        def on_replica():
            optimizer.apply([v.value + 1.0 for v in variables], variables)

        strategy.run(on_replica)
        return tf.identity(variables[-1].value)

    start = time.perf_counter()
    concrete = step.get_concrete_function()
    seconds = time.perf_counter() - start
    concrete()
    return concrete, seconds


def _timed(concrete):
    def run():
        seconds = []
        for _ in range(_STEPS.value):
            start = time.perf_counter()
            concrete().numpy()
            seconds.append(time.perf_counter() - start)
        return seconds

    return run


def _compare(strategy, cases):
    """Prints a line per case: tracing, then steps in interleaved blocks."""
    steps, tracing = {}, {}
    for name, (num_variables, num_groups) in cases.items():
        steps[name], tracing[name] = _made(strategy, num_variables, num_groups)
    medians = measuring.interleaved(
        {name: _timed(step) for name, step in steps.items()}, _BLOCKS.value
    )
    first, *_ = cases
    for name, (num_variables, _) in cases.items():
        low, middle, high = measuring.quartiles(medians[name])
        ratio = measuring.quartiles(measuring.ratios(medians, name, first))
        print(
            f"{name:34} tracing {tracing[name]:7.3f} s,"
            f" {1e3 * tracing[name] / num_variables:6.2f} ms a variable; step"
            f" {1e3 * middle:8.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f}),"
            f" {ratio[1]:.2f} times {first!r} ({ratio[0]:.2f} to"
            f" {ratio[2]:.2f})",
            flush=True,
        )


def main(argv):
    del argv
    strategy = logical_devices.best_strategy(NUM_REPLICAS)
    measuring.print_setting(
        f"{logical_devices.describe(strategy)}, {os.cpu_count()} cores"
    )
    _compare(
        strategy,
        {f"{count} variables": (count, 1) for count in NUM_VARIABLES}
        | {
            f"{count} variables, {PLAIN}": (count, None)
            for count in NUM_VARIABLES
        },
    )
    _compare(
        strategy,
        {
            f"{count} group(s), 100 variables": (100, count)
            for count in NUM_GROUPS
        }
        | {f"{PLAIN}, 100 variables": (100, None)},
    )


if __name__ == "__main__":
    app.run(main)
