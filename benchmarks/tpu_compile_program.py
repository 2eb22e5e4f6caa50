"""Compiles one step for TPUs, in a process that has that many logical CPUs.

Prints what `tpu_compile.py` wants to know, as JSON.
"""

from __future__ import annotations

import json
import os
import time

import keras
import numpy as np
from absl import app
from absl import flags

import tf_xshard
from tests.support import paths
from tests.support import processes
from tf_xshard import testing

_TOPOLOGY = flags.DEFINE_string("topology", "v5e:2x4", "The TPUs.")
_NUM_REPLICAS = flags.DEFINE_integer("num_replicas", 8, "How many cores.")
_NUM_GROUPS = flags.DEFINE_integer("num_groups", 2, "How many groups.")
_PATH = flags.DEFINE_enum(
    "path",
    "native",
    ["plain", "native", "stacked"],
    "Plain Keras, or group sums with and without a device assignment.",
)
_WIDTH = flags.DEFINE_integer("width", 16, "Units of a hidden layer.")
_LAYERS = flags.DEFINE_integer("layers", 1, "Hidden layers.")


def run(**flag_values) -> dict:
    """Runs this program in a process of its own.

    Args:
      **flag_values: Its flags.

    Returns:
      What it prints.
    """
    ended = processes.run(
        [
            *processes.python("-m", "benchmarks.tpu_compile_program"),
            *(f"--{name}={value}" for name, value in flag_values.items()),
        ],
        1800,
        check=True,
        env={**os.environ, "PYTHONPATH": str(paths.ROOT)},
    )
    return json.loads(ended.stdout.splitlines()[-1])


def main(argv):
    del argv
    num_replicas = _NUM_REPLICAS.value
    strategy = testing.simulated_tpu_strategy(
        num_replicas, device_assignment=_PATH.value != "stacked"
    )
    groups = tf_xshard.GroupAssignment.strided(
        num_replicas, num_replicas // _NUM_GROUPS.value
    )
    with strategy.scope():
        optimizer = keras.optimizers.Adam()
        if _PATH.value != "plain":
            optimizer = tf_xshard.CrossShardOptimizer(
                optimizer, group_assignment=groups
            )
        width = _WIDTH.value
        model = keras.Sequential(
            [
                keras.layers.Input((width,)),
                *(
                    keras.layers.Dense(width, activation="relu")
                    for _ in range(_LAYERS.value)
                ),
                keras.layers.Dense(10),
            ]
        )
        model.compile(optimizer=optimizer, loss="mse")
    start = time.perf_counter()
    compiled = testing.compile_for_tpu(
        model,
        np.zeros([2 * num_replicas, width], "float32"),
        np.zeros([2 * num_replicas, 10], "float32"),
        topology=_TOPOLOGY.value,
    )
    print(
        json.dumps(
            {
                "collectives": [
                    [c.kind, c.num_bytes] for c in compiled.collectives
                ],
                "parameters": model.count_params(),
                "peak_bytes": compiled.memory.peak_bytes,
                "compile_seconds": compiled.compile_seconds,
                "total_seconds": time.perf_counter() - start,
            }
        )
    )


if __name__ == "__main__":
    app.run(main)
