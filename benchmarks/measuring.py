"""Functions shared by the benchmarks."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf


def print_setting(devices: str) -> None:
    """Prints versions and devices, which every number depends on."""
    print(
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, Python"
        f" {platform.python_version()}, {platform.machine()}; {devices}",
        flush=True,
    )


def loopback_bytes() -> int:
    """Returns the bytes sent over the loopback interface since the start."""
    with open("/proc/net/dev") as devices:
        [line] = [one for one in devices if one.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


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
