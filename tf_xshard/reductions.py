"""The reductions of several losses to one: one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

# The values of tf.compat.v1.losses.Reduction, which the original optimizers
# take.
_ALIASES = {"weighted_mean": "mean", "weighted_sum": "sum"}


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How the losses of several replicas, or towers, become one.

    Attributes:
      name: What users pass.
      divisor: A function of the number of losses, by whose value their sum is
        divided. None for a reduction that is no multiple of the sum; no
        optimizer can use it, since gradients travel as sums.
    """

    name: str
    divisor: Callable[[Any], Any] | None = None

    def of_sum(self, count: Any) -> Any:
        """What to divide the sum of `count` values by."""
        assert self.divisor is not None, self.name
        return self.divisor(count)

    def weight(self, count: int) -> int:
        """What to multiply accumulated values by.

        The mean of `count` weighted values is then their reduction. TensorFlow
        and GroupState save, restore and regroup means, so an open accumulation
        can be restored on any number of replicas.
        """
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
    if found is None or found.divisor is None:
        known = [f'"{one.name}"' for one in TABLE.values() if one.divisor]
        raise ValueError(
            f"reduction must be {' or '.join(known)}, got {value!r}."
        )
    return found
