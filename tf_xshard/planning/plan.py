"""Defines the values that `communication_plan` returns, and prints them."""

from __future__ import annotations

import dataclasses
import functools

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import text_table
from tf_xshard.collectives import recorder

_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclasses.dataclass(frozen=True)
class PlannedOperation(recorder.Collective):
    """One collective of a step, as one replica sees it; `num_bytes` is known.

    Attributes:
      bytes_sent: The bytes that the replica sends, by the rule of the ring.
      seconds: The time at the plan's speed, in seconds; None without a speed.
    """

    num_bytes: int
    bytes_sent: float = 0
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class CommunicationPlan:
    """A plan of what one replica communicates, by `communication_plan`.

    Averages per step are over a whole update. A collective that runs in one of
    four steps counts a quarter.

    Attributes:
      operations: The collectives of a step, `PlannedOperation`s in order.
      num_replicas: The number of replicas.
      slot_bytes: The bytes of the optimizer's variables on one replica.
      bucket_bytes: The bytes that packing copies while a step communicates.
      gigabytes_per_second: The speed of a link within a host and across hosts;
        None for a plan without times.
    """

    operations: tuple[PlannedOperation, ...]
    num_replicas: int
    slot_bytes: int
    bucket_bytes: int
    gigabytes_per_second: tuple[float, float] | None = None

    @property
    def steps_per_update(self) -> int:
        """The number of steps after which all operations have run."""
        return max([1, *(one.every for one in self.operations)])

    @property
    def collectives_per_step(self) -> float:
        """The number of collectives per step."""
        return sum(1 / one.every for one in self.operations)

    @property
    def bytes_per_step(self) -> float:
        """The bytes that a replica passes to collectives per step."""
        return sum(one.num_bytes / one.every for one in self.operations)

    @property
    def bytes_sent_per_step(self) -> float:
        """The bytes that a replica sends per step, by the rule of the ring."""
        return sum(one.bytes_sent / one.every for one in self.operations)

    @property
    def seconds_per_step(self) -> float | None:
        """The time at the plan's speed, in seconds; None without a speed."""
        if self.gigabytes_per_second is None:
            return None
        return sum((one.seconds or 0) / one.every for one in self.operations)

    def difference(self, other: CommunicationPlan) -> PlanDifference:
        """Compares this plan with another.

        Args:
          other: A `CommunicationPlan`, such as the same model's with groups.

        Returns:
          A `PlanDifference`, which prints as a table.

        Raises:
          TypeError: If `other` is not a plan.

        Example:

        >>> plan = tf_xshard.communication_plan(
        ...     tf_xshard.CrossShardOptimizer(keras.optimizers.SGD()),
        ...     [keras.Variable(1.0)])
        >>> plan.difference(plan).ratio("bytes_per_step")
        1.0
        """
        if not isinstance(other, CommunicationPlan):
            raise TypeError(
                "difference() compares with a plan of communication_plan(),"
                f" got {other!r}."
            )
        return PlanDifference(self, other)

    def __str__(self) -> str:
        header = ["operation", "purpose", "groups", "dtype", "variables"]
        header += ["bytes", "sent", "steps"]
        timed = self.seconds_per_step is not None
        rows = [header + ["time"] * timed]
        for one in self.operations:
            row = [one.operation, one.purpose, _shown_groups(one.groups)]
            row += [one.dtype, str(one.num_variables or "-")]
            row += [_shown_bytes(one.num_bytes), _shown_bytes(one.bytes_sent)]
            row += ["each" if one.every == 1 else f"1 in {one.every}"]
            rows.append(row + [_shown_seconds(one.seconds)] * timed)
        paths = dict.fromkeys(one.path for one in self.operations)
        lines = [*text_table.aligned(rows), ""]
        lines += [f"path: {path}" for path in paths]
        lines += [
            f"{name}: {_shown(name, value)}"
            for name, value in self.totals().items()
        ]
        return "\n".join(lines)

    def totals(self) -> dict[str, float]:
        """Returns the attributes that are one number, by their names.

        Returns:
          A dict, with `seconds_per_step` only if the plan has a speed.

        Example:

        >>> tf_xshard.communication_plan(
        ...     tf_xshard.CrossShardOptimizer(keras.optimizers.SGD()),
        ...     [keras.Variable(1.0)]).totals()["bytes_per_step"]
        0
        """
        names = ["collectives_per_step", "bytes_per_step"]
        names += ["bytes_sent_per_step", "steps_per_update"]
        names += ["slot_bytes", "bucket_bytes"]
        if self.seconds_per_step is not None:
            names.append("seconds_per_step")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class PlanDifference:
    """Two plans side by side, which print as a table.

    Attributes:
      first: A `CommunicationPlan`.
      second: The plan that `first` is compared with.
    """

    first: CommunicationPlan
    second: CommunicationPlan

    def ratio(self, name: str) -> float:
        """Divides a number of the second plan by the first plan's.

        Args:
          name: A key of `CommunicationPlan.totals`.

        Returns:
          The ratio, a float; 1.0 if both are 0, inf if only the first is 0.

        Raises:
          KeyError: If a plan has no such number.
        """
        first, second = self.first.totals()[name], self.second.totals()[name]
        if first == second:
            return 1.0
        return second / first if first else float("inf")

    def __str__(self) -> str:
        first, second = self.first.totals(), self.second.totals()
        rows = [["", "first", "second", "second / first"]] + [
            [
                name,
                _shown(name, first[name]),
                _shown(name, second[name]),
                f"{self.ratio(name):.3g}",
            ]
            for name in first
            if name in second
        ]
        return "\n".join(text_table.aligned(rows))


def _shown(name: str, value: float) -> str:
    if "bytes" in name:
        return _shown_bytes(value)
    if "seconds" in name:
        return _shown_seconds(value)
    return f"{value:.4g}"


def _shown_bytes(value: float) -> str:
    for unit in _UNITS[:-1]:
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} {_UNITS[-1]}"


def _shown_seconds(value: float | None) -> str:
    return "-" if value is None else f"{1000 * value:.3g} ms"


@functools.cache
def _shown_groups(groups: group_assignment_lib.GroupAssignment) -> str:
    if groups.num_groups == 1:
        return f"all {groups.num_replicas}"
    return f"{groups.num_groups} of {groups.group_size}"
