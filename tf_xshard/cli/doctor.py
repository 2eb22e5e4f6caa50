"""Prints versions and devices, and checks the paths of group sums."""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tf_xshard import collectives
from tf_xshard.cli import bandwidth
from tf_xshard.cli import logical_devices
from tf_xshard.collectives import channel
from tf_xshard.distribute import site as site_lib
from tf_xshard.multi_worker import local_cluster

NUM_REPLICAS = 4
TIMEOUT_SECONDS = 60
# The elements differ, since replicas may get different elements.
_FACTORS = (1.0, 2.0, 3.0)
_ADVICE = (
    "--    Losses: not checked. `fit` divides the losses of rows by the number"
    " of replicas, but not a loss that returns one number. Wrap such a function"
    " in tf_xshard.ScalarLoss, and divide the loss yourself in a custom"
    " train_step."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--bandwidth",
        action="store_true",
        help="also measure what each path gives, in GB/s; takes minutes",
    )
    parser.set_defaults(run=run)


def _report(ok: bool, text: str) -> bool:
    print(f"{'ok  ' if ok else 'FAIL'}  {text}", flush=True)
    return ok


def rotated_groups(num_replicas: int) -> list[list[list[int]]]:
    """Returns assignments whose sums reveal wrongly grouped replicas."""
    # Each replica stands one place behind its number. Pairs are then neither
    # contiguous nor strided, and differ from the pairs of the transposed array.
    # With four replicas, the pairs are [[3, 0], [1, 2]].
    order = np.roll(np.arange(num_replicas), 1)
    sizes = [size for size in (2, num_replicas, 1) if num_replicas % size == 0]
    return [order.reshape(-1, size).tolist() for size in dict.fromkeys(sizes)]


def group_sums(
    strategy: tf.distribute.Strategy,
    groups: list[list[int]],
    graph: bool,
    shard_update: bool = False,
) -> tuple[str, np.ndarray]:
    """Applies each replica's gradient 10^replica * [1, 2, 3] to a weight."""
    assignment = tf_xshard.GroupAssignment(groups)
    # TPUs can't sum float64.
    is_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
    dtype = "float32" if is_tpu else "float64"
    with strategy.scope():
        weight = keras.Variable(np.zeros(len(_FACTORS)), dtype=dtype)
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0),
            "sum",
            assignment,
            loss_normalization="replica",
            communication=tf_xshard.Communication(
                timeout_seconds=TIMEOUT_SECONDS
            ),
            shard_update=shard_update,
        )
    names: list[str] = []

    def on_replica():
        context = tf.distribute.get_replica_context()
        site = site_lib.current()
        names.append(
            "identity: no communication"
            if assignment.group_size == 1
            else collectives.transport_for(
                site, channel.Channel(assignment, optimizer.communication)
            ).name
        )
        gradient = tf.pow(
            tf.constant(10.0, dtype),
            tf.cast(context.replica_id_in_sync_group, dtype),
        )
        optimizer.apply([gradient * tf.constant(_FACTORS, dtype)], [weight])

    def step():
        strategy.run(on_replica)

    (tf.function(step) if graph else step)()
    values = strategy.experimental_local_results(weight.value)
    return names[0], np.array([-np.asarray(value) for value in values])


def check_strategy(
    title: str, strategy: tf.distribute.Strategy, first_replica: int = 0
) -> bool:
    """Compares group sums with NumPy, and prints a line for each sum."""
    right = True
    num_replicas = strategy.num_replicas_in_sync
    own = 10.0 ** np.arange(num_replicas)
    for groups in rotated_groups(num_replicas):
        for graph, sharded in itertools.product((True, False), repeat=2):
            if not graph and isinstance(strategy, tf.distribute.TPUStrategy):
                continue  # TPUStrategy.run needs a tf.function.
            if sharded and len(groups[0]) == 1:
                continue  # Nothing is split.
            expected = np.zeros(num_replicas)
            for members in groups:
                expected[members] = own[members].sum()
            where = f"{title}, {'tf.function' if graph else 'eager'}, {groups}"
            if sharded:
                where += ", reduce-scatter and all-gather"
            try:
                name, got = group_sums(strategy, groups, graph, sharded)
            except Exception as error:  # Every error must be reported.
                right = _report(
                    False, f"{where}: {type(error).__name__}: {error}"
                )
                continue
            wanted = np.outer(
                expected[first_replica : first_replica + len(got)], _FACTORS
            )
            if np.array_equal(got, wanted):
                _report(True, f"{where}: {name}")
            else:
                right = _report(
                    False,
                    f"{where}: {name} gave {got}, expected {wanted.tolist()}."
                    " Please report this together with the lines above.",
                )
    return right


def _check_processes(measures: bool) -> bool:
    """Checks MultiWorkerMirroredStrategy with processes on this machine."""
    nowhere = subprocess.DEVNULL
    timeout_seconds = 3 * TIMEOUT_SECONDS * (4 if measures else 1)
    processes = local_cluster.start(
        ["-m", "tf_xshard", "doctor", "--worker"] + ["--bandwidth"] * measures,
        [(None, nowhere)] + [(nowhere, nowhere)] * (NUM_REPLICAS - 1),
        {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
    )
    try:
        codes = [p.wait(timeout=timeout_seconds) for p in processes]
    except subprocess.TimeoutExpired:
        return _report(
            False,
            "MultiWorkerMirroredStrategy: not finished after"
            f" {timeout_seconds} s. Is the loopback interface up, and are"
            " ports free?",
        )
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return _report(
        not any(codes),
        f"MultiWorkerMirroredStrategy: {NUM_REPLICAS} processes on the loopback"
        f" interface exited with {codes}",
    )


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prints one line per check."""
    del parser
    if options.worker:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        rank = strategy.cluster_resolver.task_id
        name = "MultiWorkerMirroredStrategy"
        right = check_strategy(name, strategy, rank)
        if options.bandwidth:
            bandwidth.measure(name, strategy, shows=not rank)
        sys.stdout.flush()
        # A normal exit would wait for other workers, which may have failed.
        os._exit(0 if right else 1)
    print(
        f"tf_xshard {tf_xshard.__version__}, TensorFlow {tf.__version__}, Keras"
        f" {keras.__version__}, Python {sys.version.split()[0]}"
    )
    found = {
        kind: len(tf.config.list_physical_devices(kind))
        for kind in ("CPU", "GPU", "TPU")
    }
    print(f"Physical devices: {found}")
    # `import tf_xshard` has already checked all private names that it needs.
    right = True
    # Devices are fixed once TensorFlow runs, so the strategy is created first.
    strategy = logical_devices.best_strategy(NUM_REPLICAS)
    print(f"The demo would run on {logical_devices.describe(strategy)}")
    right &= check_strategy("no strategy", tf.distribute.get_strategy())
    right &= check_strategy(
        "OneDeviceStrategy", tf.distribute.OneDeviceStrategy("CPU:0")
    )
    right &= check_strategy(logical_devices.describe(strategy), strategy)
    if options.bandwidth:
        bandwidth.measure(logical_devices.describe(strategy), strategy)
    right &= _check_processes(options.bandwidth)
    if not found["TPU"]:
        print("--    TPUStrategy: not checked, this machine has no TPU")
    print(_ADVICE)
    return 0 if right else 1
