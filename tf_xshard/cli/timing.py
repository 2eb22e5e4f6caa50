"""Times functions in turn, so that a busy machine slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

NUM_BLOCKS = 7


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    wait: Callable[[Any], Any],
    seconds: float = 0.0,
    num_blocks: int = NUM_BLOCKS,
) -> dict[str, np.ndarray]:
    """Times each function in several blocks.

    Args:
      functions: What is timed.
      wait: Gets a function's result, and returns when it is there.
      seconds: The length of a block of a function, which runs at least once.
      num_blocks: The number of blocks.

    Returns:
      The seconds of a run in each block.
    """

    def timed(run: Callable[[], Any], num_runs: int) -> float:
        start = time.perf_counter()
        for _ in range(num_runs):
            result = run()
        wait(result)
        return (time.perf_counter() - start) / num_runs

    for run in functions.values():
        timed(run, 2)
    num_runs = {
        name: max(1, round(seconds / timed(run, 1)))
        for name, run in functions.items()
    }
    blocks = [
        {name: timed(run, num_runs[name]) for name, run in functions.items()}
        for _ in range(num_blocks)
    ]
    return {
        name: np.array([block[name] for block in blocks]) for name in functions
    }


def quartiles(ratios: np.ndarray) -> str:
    """Writes the median of ratios, and the quartiles around it."""
    low, median, high = np.percentile(ratios, [25, 50, 75])
    return f"{median:.2f} ({low:.2f} to {high:.2f})"
