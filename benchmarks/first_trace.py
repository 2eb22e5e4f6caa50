"""Claim: the first trace of one variable takes at most twice plain Keras's.

Each measurement runs in a new process, since a second trace is faster: CPU
seconds of the first trace of an `apply_gradients` in a `tf.function` under
MirroredStrategy, plain Keras and the wrapper in turn:
`python -m benchmarks.first_trace`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from absl import app
from absl import flags

_RUNS = flags.DEFINE_integer("runs", 9, "processes of each kind", 3)
_REPLICAS = flags.DEFINE_integer("replicas", 2, "logical CPUs", 2)
_VARIANT = flags.DEFINE_string("variant", None, "what one process measures")

PLAIN, OURS = "plain Keras", "CrossShardOptimizer"


def _measure(variant: str) -> float:
    """CPU seconds of the first trace in this process."""
    import keras
    import tensorflow as tf

    import tf_xshard
    from tf_xshard.cli import logical_devices

    devices = logical_devices.use_logical_cpus(_REPLICAS.value)
    strategy = tf.distribute.MirroredStrategy(devices)
    with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = keras.optimizers.SGD(0.1)
        if variant == OURS:
            optimizer = tf_xshard.CrossShardOptimizer(optimizer)
        optimizer.build([weight])

    @tf.function
    def step():
        def on_replica():
            optimizer.apply_gradients([(tf.constant(1.0), weight)])

        strategy.run(on_replica)

    start = time.process_time()
    step.get_concrete_function()
    return time.process_time() - start


def main(argv):
    del argv
    if _VARIANT.value:
        print(_measure(_VARIANT.value))
        return
    seconds = {PLAIN: [], OURS: []}
    for _ in range(_RUNS.value):
        for variant, measured in seconds.items():
            output = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.first_trace",
                    f"--variant={variant}",
                    f"--replicas={_REPLICAS.value}",
                ],
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                check=True,
            ).stdout
            measured.append(float(output))
        print(".", end="", flush=True)
    print()

    from benchmarks import measuring

    measuring.print_setting(f"{_REPLICAS.value} logical CPUs")
    base = statistics.median(seconds[PLAIN])
    for variant, measured in seconds.items():
        low, middle, high = measuring.quartiles(measured)
        print(
            f"{variant:20} {middle:.3f} CPU seconds (quartiles {low:.3f} to"
            f" {high:.3f}), {middle / base:.2f} of {PLAIN}"
        )


if __name__ == "__main__":
    app.run(main)
