"""Lists the reductions of several losses to one loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

# The original optimizers take these values of tf.compat.v1.losses.Reduction.
_ALIASES = {"weighted_mean": "mean", "weighted_sum": "sum"}


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Describes a reduction of several replicas' or towers' losses to one."""

    # Users pass this name.
    name: str
    # Returns the divisor of the sum, from the number of losses.
    of_sum: Callable[[Any], Any]

    def weight(self, count: int) -> int:
        """Returns the reduction of `count` values divided by their mean."""
        # TensorFlow and GroupState save, restore and regroup means. With this
        # factor, an open accumulation can be restored on any number of
        # replicas.
        return count // self.of_sum(count)


def _count(count: Any) -> Any:
    return count


def _one(count: Any) -> int:
    del count
    return 1


MEAN = Reduction("mean", _count)
SUM = Reduction("sum", _one)
TABLE = {one.name: one for one in (MEAN, SUM)}


def checked(value: Any) -> Reduction:
    """Converts a `reduction` argument, or raises ValueError."""
    name = value if isinstance(value, str) else ""
    found = TABLE.get(_ALIASES.get(name, name))
    if found is None:
        known = [f'"{name}"' for name in TABLE]
        raise ValueError(
            f"reduction must be {' or '.join(known)}, got {value!r}."
        )
    return found
