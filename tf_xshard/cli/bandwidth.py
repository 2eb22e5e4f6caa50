"""Measures the speed of collectives on this machine, in GB/s."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tf_xshard import collectives
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.collectives import channel as channel_lib
from tf_xshard.collectives import recorder
from tf_xshard.distribute import site as site_lib

MEGABYTES = (1, 16, 256)
_NUM_RUNS = 5
_BYTES_PER_FLOAT = 4
OPERATIONS = ("sum", "reduce_scatter", "all_gather")


def measure(
    title: str, strategy: tf.distribute.Strategy, shows: bool = True
) -> None:
    """Prints the speed of one strategy's collectives, as nccl-tests do."""
    # MB is the size of the whole tensor. Each replica passes its shard of the
    # tensor to an all-gather. GB/s is what a replica sends by the rule of the
    # ring, divided by the median time of five runs.
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
            channel_lib.Channel(
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
