"""Prints versions and devices; checks and times the paths of group sums."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tf_xshard import collectives
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.cli import checks
from tf_xshard.cli import logical_devices
from tf_xshard.cli import timing
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
    _wait(strategy, run())
    found = list(created)  # Eager code adds collectives in every run.
    times = timing.interleaved(
        {"run": run}, functools.partial(_wait, strategy), num_blocks=_NUM_RUNS
    )
    seconds = float(np.median(times["run"]))
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


def _wait(strategy: tf.distribute.Strategy, result: Any) -> None:
    for one in strategy.experimental_local_results(result):
        one.numpy()


NUM_REPLICAS = 4
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


def check_strategy(
    title: str, strategy: tf.distribute.Strategy, first_replica: int = 0
) -> bool:
    """Compares group sums with NumPy, and prints a line for each sum."""
    found = [
        _report(ok, f"{title}, {text}")
        for ok, text in checks.of_strategy(strategy, first_replica)
    ]
    return all(found)


def _check_processes(measures: bool) -> bool:
    """Checks MultiWorkerMirroredStrategy with processes on this machine."""
    nowhere = subprocess.DEVNULL
    timeout_seconds = 3 * checks.TIMEOUT_SECONDS * (4 if measures else 1)
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
