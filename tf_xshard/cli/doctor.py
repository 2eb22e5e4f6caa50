"""Prints versions and devices; checks and times the paths of group sums."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tf_xshard import collectives
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.cli import logical_devices
from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import engines
from tf_xshard.distribute import site as site_lib
from tf_xshard.multi_worker import connect
from tf_xshard.multi_worker import exchange
from tf_xshard.multi_worker import local_cluster

MEGABYTES = (1, 16, 256)
_NUM_RUNS = 5
_BYTES_PER_FLOAT = 4
OPERATIONS = ("sum", "reduce_scatter", "all_gather")


def measure(
    title: str, strategy: tf.distribute.Strategy, shows: bool = True
) -> None:
    """Prints the speed of one strategy's collectives, as nccl-tests do."""
    # MB is the size of the whole tensor. Each replica passes its shard of the
    # tensor to an all-gather. GB/s is the number of bytes that a replica sends
    # in a ring collective, divided by the median time of five runs.
    modes = ["tf.function", "eager"]
    if isinstance(strategy, tf.distribute.TPUStrategy):
        modes = modes[:1]  # TPUStrategy.run needs a tf.function.
    cases = [
        (mode, operation, size)
        for mode in modes
        for operation in OPERATIONS
        for size in MEGABYTES
    ]
    if shows:
        print(f"{title}, {strategy.num_replicas_in_sync} replicas")
    progress = keras.utils.Progbar(len(cases), verbose=int(shows))
    rows: list[tuple[str, float, float, str]] = []
    for number, case in enumerate(cases):
        rows.append(_measured(strategy, *case))
        progress.update(number + 1)
    if not shows:
        return
    print(f"{'':12}{'operation':16}{'MB':>5}{'ms':>10}{'GB/s':>8}  path")
    for (mode, _, size), (name, milliseconds, speed, path) in zip(
        cases, rows, strict=True
    ):
        print(
            f"{mode:12}{name:16}{size:5}{milliseconds:10.2f}{speed:8.2f}"
            f"  {path}"
        )


def _measured(
    strategy: tf.distribute.Strategy, mode: str, operation: str, size: int
) -> tuple[str, float, float, str]:
    """Returns the collective's name, milliseconds, GB/s and path."""
    num_replicas = strategy.num_replicas_in_sync
    num_floats = size * 1_000_000 // _BYTES_PER_FLOAT
    num_floats -= num_floats % num_replicas
    with strategy.scope():
        variable = keras.Variable(
            tf.zeros([num_floats]), dtype="float32", trainable=False
        )

    created: recorder.Found = []

    def on_replica() -> tf.Tensor:
        site = site_lib.current()
        transport = collectives.transport_for(
            site,
            transport_lib.Channel(
                group_assignment_lib.GroupAssignment.single(num_replicas),
                communication_lib.Communication(),
            ),
        )
        tensor = tf.convert_to_tensor(variable.value)
        if operation == "reduce_scatter":
            tensor = tf.reshape(tensor, [num_replicas, -1])
        if operation == "all_gather":
            tensor = tensor[: num_floats // num_replicas]
        with recorder.recorded(created):
            result = getattr(transport, operation)([tensor])[0]
        # Returning a number of the result keeps the collective from being
        # optimized away.
        return tf.reshape(result, [-1])[-1]

    run = functools.partial(strategy.run, on_replica)
    if mode == "tf.function":
        run = tf.function(run, autograph=False)
    _wait(strategy, run)
    found = list(created)  # Eager code adds collectives in every run.
    seconds = statistics.median(
        _seconds(strategy, run) for _ in range(_NUM_RUNS)
    )
    first = [one for one, r in found if r == found[0][1]]
    sent = sum(
        recorder.bytes_sent(one.operation, one.num_bytes, one.groups.group_size)
        for one in first
    )
    return (
        first[0].operation,
        1e3 * seconds,
        sent / seconds / 1e9,
        first[0].path,
    )


def _wait(strategy: tf.distribute.Strategy, run: Callable) -> Sequence:
    results = strategy.experimental_local_results(run())
    return [one.numpy() for one in results]


def _seconds(strategy: tf.distribute.Strategy, run: Callable) -> float:
    start = time.perf_counter()
    _wait(strategy, run)
    return time.perf_counter() - start


NUM_REPLICAS = 4
TIMEOUT_SECONDS = 60
# The elements differ, since replicas may get different elements.
_FACTORS = (1.0, 2.0, 3.0)
_ADVICE = (
    "--    Losses: not checked. `fit` divides a loss that returns a value for"
    " each row by the number of replicas, but not a loss that returns one"
    " number. Wrap a function that returns one number in tf_xshard.ScalarLoss."
    " In a custom train_step, divide the loss yourself."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--bandwidth",
        action="store_true",
        help="also measure each path's bandwidth in GB/s; takes minutes."
        " `mpiexec -n 4 tf-xshard doctor --bandwidth` measures MPI",
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
                site, transport_lib.Channel(assignment, optimizer.communication)
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
            "MultiWorkerMirroredStrategy: did not finish within"
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


def _check_as_worker(measures: bool) -> bool:
    """Checks the processes that an engine, or this command, has started."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
    name = "MultiWorkerMirroredStrategy"
    said = io.StringIO()
    with contextlib.redirect_stdout(said if rank else sys.stdout):
        right = check_strategy(name, strategy, rank)
        if measures:
            measure(name, strategy, shows=not rank)
    for line in said.getvalue().splitlines():
        if line.startswith("FAIL"):
            print(f"rank {rank}: {line}", file=sys.stderr)
    sys.stdout.flush()
    return right


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prints one line per check."""
    del parser
    if options.worker:
        right = _check_as_worker(options.bandwidth)
        # A normal exit would wait for other workers, which may have failed.
        os._exit(0 if right else 1)
    if engines.size_of_step()[1] > 1 and engines.task() is None:
        try:
            connect.connect()
        except (ValueError, exchange.JobError) as error:
            return 0 if _report(False, str(error)) else 1
        return 0 if _check_as_worker(options.bandwidth) else 1
    # The checks below use only this machine.
    os.environ[engines.ALONE] = "1"
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
        measure(logical_devices.describe(strategy), strategy)
    right &= _check_processes(options.bandwidth)
    if not found["TPU"]:
        print("--    TPUStrategy: not checked, this machine has no TPU")
    print(_ADVICE)
    return 0 if right else 1
