"""What every benchmark here does the same way."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from tf_xshard import collectives
from tf_xshard.distribute import replica_variables


def print_setting(devices: str) -> None:
    """Versions and devices, without which no number can be read."""
    print(
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, Python"
        f" {platform.python_version()}, {platform.machine()}; {devices}",
        flush=True,
    )


def interleaved(
    timed: Mapping[str, Callable[[], Sequence[float]]],
    num_blocks: int,
) -> dict[str, list[float]]:
    """Median seconds of each variant in each block.

    Args:
      timed: For each variant, a function that runs some steps and returns the
        seconds of each.
      num_blocks: How often all variants run. Their order rotates, so that none
        always runs first.

    Returns:
      For each variant, one median per block.
    """
    names = list(timed)
    medians = {name: [] for name in names}
    for block in range(num_blocks):
        shift = block % len(names)
        for name in names[shift:] + names[:shift]:
            medians[name].append(statistics.median(timed[name]()))
        print(".", end="", flush=True)
    print()
    return medians


def ratios(medians: dict[str, list[float]], name: str, baseline: str):
    """`name`'s median over `baseline`'s, block by block, sorted."""
    return sorted(
        some / base
        for some, base in zip(medians[name], medians[baseline], strict=True)
    )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def loopback_bytes() -> int:
    """Bytes sent over the loopback interface since the machine started."""
    with open("/proc/net/dev") as devices:
        [line] = [one for one in devices if one.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


@contextlib.contextmanager
def group_sums(strategy: tf.distribute.Strategy):
    """Counts the group sums that run, each next to its collective.

    Only in functions that are traced meanwhile.

    Yields:
      A function that returns, for each replica, how many group sums have run
      and how many bytes it has handed to them.
    """
    with strategy.scope():
        ran = replica_variables.make((2,), "int64", "ran")
    choose = collectives.choose

    def counting(here, groups):
        transport = choose(here, groups)

        def group_sum(tensors, *where):
            size = sum(t.dtype.size * t.shape.num_elements() for t in tensors)
            replica_variables.add(ran, [1, size])
            return transport.group_sum(tensors, *where)

        return dataclasses.replace(transport, group_sum=group_sum)

    collectives.choose = counting
    try:
        yield lambda: [
            one.numpy().tolist()
            for one in strategy.experimental_local_results(ran.value)
        ]
    finally:
        collectives.choose = choose
