"""Horovod's process sets on the tensors of benchmarks/multi_worker.py.

`horovodrun -np 4 --gloo python horovod_process_sets.py NUM_STEPS`, in its own
environment: Horovod 0.28.1 needs an older TensorFlow, so nothing of this
project is imported here. Prints the median seconds per step.
"""

import json
import statistics
import sys
import time

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

SHAPES = [shape for _ in range(81) for shape in ((800, 800), (800,))]
GROUPS = [[0, 2], [1, 3]]
_WARM_UP = 3


def main(num_steps):
    sets = [hvd.ProcessSet(ranks) for ranks in GROUPS]
    hvd.init(process_sets=sets)
    rank = hvd.rank()
    [(mine, members)] = [
        pair for pair in zip(sets, GROUPS, strict=True) if rank in pair[1]
    ]
    variables = [tf.Variable(tf.fill(s, 2.0**rank)) for s in SHAPES]

    @tf.function
    def step():
        sums = [
            hvd.allreduce(
                v.read_value(), op=hvd.Sum, name=f"g{i}", process_set=mine
            )
            for i, v in enumerate(variables)
        ]
        return tf.stack([tf.reshape(one, [-1])[0] for one in sums])

    expected = sum(2.0**r for r in members)
    seconds = []
    for index in range(_WARM_UP + num_steps):
        hvd.allreduce(tf.constant(1.0), name="barrier")
        start = time.perf_counter()
        np.testing.assert_array_equal(step().numpy(), expected)
        if index >= _WARM_UP:
            seconds.append(time.perf_counter() - start)
    if rank == 0:
        low, middle, high = statistics.quantiles(
            seconds, n=4, method="inclusive"
        )
        found = {"median": middle, "quartiles": [low, high]}
        print(
            f"TensorFlow {tf.__version__}, horovod {json.dumps(found)}",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
