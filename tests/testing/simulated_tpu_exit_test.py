"""A program that leaves a distributed iterator unfinished ends soon."""

import subprocess
import sys
import threading
import time

from tests.support import paths

_PROGRAM = """
import keras
import numpy as np
import tensorflow as tf
from tf_xshard import testing

strategy = testing.simulated_tpu_strategy(8)
x = np.zeros([4096, 16], "float32")
data = tf.data.Dataset.from_tensor_slices(x).shuffle(1000).repeat()
data = data.batch(64, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
iterator = iter(strategy.experimental_distribute_dataset(data))

@tf.function
def step(iterator):
    return strategy.run(tf.reduce_sum, args=(next(iterator),))

for _ in range(20):
    step(iterator)
print("ended", flush=True)
"""


def test_it_does_not_linger():
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=paths.ROOT,
    ) as process:
        timer = threading.Timer(90, process.kill)
        timer.start()
        assert process.stdout.readline() == "ended\n"
        timer.cancel()
        start = time.monotonic()
        assert process.wait(120) == 0
        # 2 s on an idle machine; it was 41 s.
        assert time.monotonic() - start < 15
