"""What each process of mpi_test.py runs, started by `mpiexec`.

`python -m tests.programs.mpi_program [leaves]`. Prints one JSON
line with what this process's replica holds.
"""

import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tf_xshard import collectives
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import site as site_lib

NUM_WORKERS = 2
SUMMED = ("float32", "float64", "int32", "int64", "bfloat16", "float16")
MOVED = ("int8", "bfloat16", "float32")
# An odd number of elements, none at all, and more than MPI's own all-reduce
# gets.
SHAPES = ([3, 5], [], [0], [4099, 3])


def _every(shape, dtype):
    """Small integers of each process, which every dtype holds exactly."""
    return [
        np.random.default_rng(rank)
        .integers(-9, 9, size=shape)
        .astype(tf.as_dtype(dtype).as_numpy_dtype)
        for rank in range(NUM_WORKERS)
    ]


def _transport(groups):
    return collectives.transport_for(
        site_lib.current(),
        transport_lib.Channel(
            tf_xshard.GroupAssignment(groups),
            tf_xshard.Communication(timeout_seconds=60),
        ),
    )


def operations(strategy, graph):
    """The transport's name, and what its operations and NumPy give, by name."""
    rank, result, expected = tf_xshard.rank(strategy), {}, {}

    def on_replica():
        # In the order of ranks, whatever the order in the group.
        together, alone = _transport([[1, 0]]), _transport([[0], [1]])
        result["path"] = together.name
        found = {}

        def check(operation, every, wanted):
            name = f"{operation.__name__} {every[0][0].dtype} {len(found)}"
            own = [tf.constant(values[rank]) for values in every]
            found[name], expected[name] = operation(own), wanted

        numbers = _every([3], "float32")
        check(alone.sum, [numbers], [numbers[rank]])
        for dtype in SUMMED:
            every = [_every(shape, dtype) for shape in SHAPES]
            check(together.sum, every, [sum(one) for one in every])
            rows = _every([2, 3], dtype)
            check(together.reduce_scatter, [rows], [sum(rows)[rank]])
        for dtype in MOVED:
            rows = _every([2, 3], dtype)
            check(together.all_to_all, [rows], [np.stack(rows)[:, rank]])
            check(
                together.all_gather,
                [[r[0] for r in rows]],
                [np.stack(rows)[:, 0]],
            )
            some = [rows[0], rows[1][:0]]
            check(together.gather, [some], [np.concatenate(some)])
        return found

    def run():
        return strategy.run(on_replica)

    found = tf.function(run, autograph=False)() if graph else run()
    wrong = [
        name
        for name, values in found.items()
        for value, wanted in zip(values, expected[name], strict=True)
        if not np.array_equal(value.numpy(), wanted)
    ]
    return [result["path"], len(found), wrong]


def leaves(strategy):
    """Worker 1 ends its program, and the others wait for it."""
    tf_xshard.barrier(strategy)
    if tf_xshard.rank(strategy) == 1:
        sys.exit()
    start = time.monotonic()
    try:
        tf_xshard.barrier(strategy, timeout_seconds=300)
    except tf.errors.OpError as error:
        return [str(error), time.monotonic() - start]


def main(case="operations"):
    tf_xshard.connect(60)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    result = (
        {"leaves": leaves(strategy)}
        if case == "leaves"
        else {
            "eager": operations(strategy, graph=False),
            "graph": operations(strategy, graph=True),
        }
    )
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    main(*sys.argv[1:])
