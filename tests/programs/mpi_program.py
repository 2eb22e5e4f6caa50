"""What each process of mpi_test.py runs, started by `mpiexec`.

`python -m tests.programs.mpi_program [raises|leaves]`. Prints one JSON
line with what this process's replica holds.
"""

import json
import sys
import time
import zlib

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tests.programs import multi_worker_program as cases
from tf_xshard import collectives
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import site as site_lib

# By the number of processes.
GROUPS = {2: [[1, 0]], 4: cases.CROSSED}
SUMMED = ("float32", "float64", "int32", "int64", "bfloat16", "float16")
MOVED = ("int8", "bfloat16", "float32")
# The processes' numbers of rows.
ROWS = (2, 0, 3, 1)
# An odd number of elements, more than MPI's own all-reduce gets.
LARGE = (4099, 3)


def checksum(numbers):
    """Stands for float64 numbers that are too many to print."""
    return zlib.crc32(np.ascontiguousarray(numbers))


def own_numbers(rank, shape, dtype):
    """Small integers, which every dtype holds exactly."""
    rng = np.random.default_rng(rank)
    return rng.integers(-9, 9, size=shape).astype(
        tf.as_dtype(dtype).as_numpy_dtype
    )


def _transport(groups):
    return collectives.transport_for(
        site_lib.current(),
        transport_lib.Channel(
            tf_xshard.GroupAssignment(groups),
            tf_xshard.Communication(timeout_seconds=60),
        ),
    )


def operations(strategy, graph):
    """Every operation of the transport, by name."""
    result = {}

    def on_replica():
        num_workers = strategy.num_replicas_in_sync
        path = _transport(GROUPS[num_workers])
        rank = path.site.rank
        result["path"] = path.name
        found = {}
        for dtype in SUMMED:
            # An odd number of elements, and none at all.
            numbers = [
                tf.constant(own_numbers(rank, shape, dtype))
                for shape in ([3, 5], [], [0])
            ]
            found[f"sum {dtype}"] = path.sum(numbers)
            large = tf.constant(own_numbers(rank, LARGE, dtype))
            found[f"checksum {dtype}"] = path.sum([large])
            rows = tf.constant(own_numbers(rank, [2, 3], dtype))
            found[f"reduce_scatter {dtype}"] = path.reduce_scatter([rows])
        # Groups of one process each.
        alone = _transport([[r] for r in range(num_workers)])
        own = tf.constant(own_numbers(rank, [3], "float32"))
        found["alone"] = alone.sum([own])
        for dtype in MOVED:
            rows = tf.constant(own_numbers(rank, [2, 3], dtype))
            found[f"all_to_all {dtype}"] = path.all_to_all([rows])
            found[f"all_gather {dtype}"] = path.all_gather([rows[0]])
            some = tf.constant(own_numbers(rank, [ROWS[rank], 2], dtype))
            found[f"gather {dtype}"] = path.gather([some])
        return found

    def run():
        return strategy.run(on_replica)

    found = tf.function(run, autograph=False)() if graph else run()
    for name, values in found.items():
        numbers = [tf.cast(v, tf.float64).numpy() for v in values]
        result[name] = [
            checksum(one) if "checksum" in name else one.tolist()
            for one in numbers
        ]
    return result


def raises(strategy):
    """Worker 1 fails, and the others wait for it."""
    tf_xshard.barrier(strategy)
    if tf_xshard.rank(strategy) == 1:
        raise ValueError("the cause")
    tf_xshard.barrier(strategy, timeout_seconds=300)


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


def main(case=None):
    tf_xshard.connect(60)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    if case:
        print(json.dumps({case: globals()[case](strategy)}), flush=True)
        return
    results = {
        "rank": tf_xshard.rank(strategy),
        "eager": operations(strategy, graph=False),
        "graph": operations(strategy, graph=True),
    }
    if strategy.num_replicas_in_sync == cases.NUM_WORKERS:
        results["oracle"] = cases.oracle(strategy)
        results["nesting"] = cases.nesting(strategy, cases.SEEDS)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    main(*sys.argv[1:])
