"""Claim: subgroup collectives beat what tf.distribute offers for group sums.

Four processes on one machine under MultiWorkerMirroredStrategy, 162 tensors and
52 million float32 numbers a step, groups of two. Subgroup collectives against a
one-hot stack through the strategy's all_reduce and against its all_gather, all
in one run, interleaved; and the bytes on the wire beside the ring's lower
bound: `python -m benchmarks.group_sums`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf
from absl import app
from absl import flags
from absl import logging

from benchmarks import measuring
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment
from tf_xshard import local_cluster
from tf_xshard import reduction
from tf_xshard import replica_context
from tf_xshard.transports import collective
from tf_xshard.transports import one_hot

_BLOCKS = flags.DEFINE_integer("blocks", 5, "interleaved blocks", 5)
_STEPS = flags.DEFINE_integer("steps", 2, "steps a block")
_TIMEOUT_SECONDS = flags.DEFINE_integer(
    "timeout_seconds", 1800, "ends a run that hangs"
)
_WORKER = flags.DEFINE_bool("worker", False, "for the program's own use")

NUM_WORKERS = 4
GROUPS = group_assignment.GroupAssignment([[0, 2], [1, 3]])
# 81 layers of 800 x 800 and their biases.
SHAPES = [shape for _ in range(81) for shape in ((800, 800), (800,))]
OURS, ONE_HOT, ALL_GATHER = "subgroup collectives", "one-hot", "all_gather"
EVERYONE = "strategy's all_reduce over all four"


def _through(transport, tensors, here):
    return reduction.sum_dense(
        tensors, transport, (here, GROUPS, communication_lib.Communication())
    )


def _all_gather(tensors, here):
    flat = tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)
    gathered = tf.distribute.get_replica_context().all_gather(
        flat[tf.newaxis], axis=0
    )
    members = list(GROUPS)[GROUPS.group_of(here.replica_id)]
    total = tf.add_n([gathered[member] for member in members])
    return tf.split(total, [int(np.prod(shape)) for shape in SHAPES])


def _everyone(tensors, here):
    del here
    return tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, tensors
    )


VARIANTS = {
    OURS: lambda tensors, here: _through(collective.TRANSPORT, tensors, here),
    ONE_HOT: lambda tensors, here: _through(one_hot.TRANSPORT, tensors, here),
    ALL_GATHER: _all_gather,
    EVERYONE: _everyone,
}


def _worker():
    # Its info lines name every collective that is traced.
    tf.get_logger().setLevel("ERROR")
    logging.set_verbosity(logging.ERROR)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
    variables = [tf.Variable(tf.fill(s, 10.0**rank)) for s in SHAPES]

    def make(variant):
        @tf.function
        def step():
            def on_replica():
                tensors = [v.read_value() for v in variables]
                sums = variant(tensors, replica_context.current())
                # A number of every tensor, so that none is left out.
                return tf.stack([tf.reshape(one, [-1])[0] for one in sums])

            return strategy.run(on_replica)

        return step

    @tf.function
    def barrier():
        def on_replica():
            return tf.distribute.get_replica_context().all_reduce(
                tf.distribute.ReduceOp.SUM, tf.constant(1.0)
            )

        return strategy.run(on_replica)

    steps = {name: make(variant) for name, variant in VARIANTS.items()}
    mine = sum(10.0**r for r in list(GROUPS)[GROUPS.group_of(rank)])
    for name, step in steps.items():
        expected = sum(10.0**r for r in range(4)) if name == EVERYONE else mine
        np.testing.assert_array_equal(step().numpy(), expected)

    def timed(name):
        def run():
            seconds = []
            for _ in range(_STEPS.value):
                barrier().numpy()
                start = time.perf_counter()
                steps[name]().numpy()
                seconds.append(time.perf_counter() - start)
            return seconds

        return run

    # Only the chief's own output is shown.
    medians = measuring.interleaved(
        {name: timed(name) for name in steps}, _BLOCKS.value
    )
    barrier().numpy()
    time.sleep(1.0)
    before = measuring.loopback_bytes()
    time.sleep(1.0)
    idle = measuring.loopback_bytes() - before
    barrier().numpy()
    before = measuring.loopback_bytes()
    for _ in range(_STEPS.value):
        steps[OURS]().numpy()
    barrier().numpy()
    time.sleep(1.0)
    # What the idle cluster sends in a second goes off; the barriers stay in.
    sent = measuring.loopback_bytes() - before - idle
    if rank == 0:
        _print_report(medians, sent)
    sys.stdout.flush()
    barrier().numpy()
    os._exit(0)


def _print_report(medians, sent):
    for name in VARIANTS:
        low, middle, high = measuring.quartiles(medians[name])
        print(
            f"{name:36} {middle:.3f} s a step (quartiles {low:.3f} to"
            f" {high:.3f})"
        )
    better = min(
        (ONE_HOT, ALL_GATHER),
        key=lambda name: measuring.quartiles(medians[name])[1],
    )
    for baseline in (better, EVERYONE):
        low, middle, high = measuring.quartiles(
            measuring.ratios(medians, baseline, OURS)
        )
        print(
            f"{baseline} / {OURS}: {middle:.2f} (quartiles {low:.2f} to"
            f" {high:.2f})"
        )
    size = GROUPS.group_size
    gradient_bytes = 4 * sum(int(np.prod(shape)) for shape in SHAPES)
    bound = 2 * (size - 1) / size * gradient_bytes
    per_process = sent / NUM_WORKERS / _STEPS.value
    print(
        f"sent by each process a step: {per_process / 1e6:.1f} MB; the ring's"
        f" lower bound 2(g-1)/g*n: {bound / 1e6:.1f} MB; ratio"
        f" {per_process / bound:.4f}"
    )


def main(argv):
    del argv
    if _WORKER.value:
        _worker()
    measuring.print_setting(
        f"{NUM_WORKERS} processes on the loopback interface, one CPU device"
        f" each, {os.cpu_count()} cores"
    )
    nowhere = subprocess.DEVNULL
    processes = local_cluster.start(
        [
            "-m",
            "benchmarks.group_sums",
            "--worker",
            f"--blocks={_BLOCKS.value}",
            f"--steps={_STEPS.value}",
        ],
        [(None, None)] + [(nowhere, nowhere)] * (NUM_WORKERS - 1),
        {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    try:
        codes = [process.wait(_TIMEOUT_SECONDS.value) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        sys.exit(f"workers ended with {codes}")


if __name__ == "__main__":
    app.run(main)
