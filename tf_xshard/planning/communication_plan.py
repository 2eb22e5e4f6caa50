"""Defines `communication_plan`, which traces a step to plan its communication.

The traced step is the optimizer's own step, with gradients of the model's
kinds. Transports record each collective (`collectives.recorder`). The traced
function never runs.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import checks
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import text_table
from tf_xshard.collectives import recorder
from tf_xshard.distribute import ownership
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.planning import step as step_lib

_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclasses.dataclass(frozen=True)
class PlannedOperation(recorder.Collective):
    """Describes a collective of a step on one replica; `num_bytes` is known.

    Attributes:
      bytes_sent: The bytes that the replica sends, computed for a ring
        collective.
      seconds: The time at the plan's speed, in seconds; None without a speed.
    """

    num_bytes: int
    bytes_sent: float = 0
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class CommunicationPlan:
    """Lists the collectives of a step on one replica; see `communication_plan`.

    Averages per step are over a whole update. A collective that runs in one of
    four steps counts as a quarter.

    Attributes:
      operations: The collectives of a step, `PlannedOperation`s in order.
      num_replicas: The number of replicas.
      slot_bytes: The bytes of the optimizer's variables on one replica.
      bucket_bytes: The bytes that packing copies while a step communicates.
      gigabytes_per_second: The speed of a link within a host and across hosts;
        None for a plan without times.
      balance: With `shard_update=True` and an optimizer that needs whole
        variables, a tuple: the cost of the update on the replica that has the
        most to do, divided by the mean over the group; the path of the
        costliest variable; the part of all costs that it has. Otherwise None.
    """

    operations: tuple[PlannedOperation, ...]
    num_replicas: int
    slot_bytes: int
    bucket_bytes: int
    gigabytes_per_second: tuple[float, float] | None = None
    balance: ownership.Balance | None = None

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
        """The bytes that a replica sends per step, for ring collectives."""
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
          other: A `CommunicationPlan`, such as a plan of the same model with
            groups.

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
                "difference() compares with a plan from communication_plan(),"
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
        if self.balance is not None:
            largest, variable, share = self.balance
            lines.append(
                "update: the replica with the most work has"
                f" {largest:.3g} times the mean. The costliest variable,"
                f" {variable}, has {share:.1%} of the cost, and one replica"
                " updates it."
            )
        return "\n".join(lines)

    def totals(self) -> dict[str, float]:
        """Returns all attributes that are a single number, by name.

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
    """Holds two plans side by side, and prints as a table.

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


_BYTES_PER_GIGABYTE = 1e9


def communication_plan(
    model: keras.Model | keras.optimizers.Optimizer,
    variables: Sequence | None = None,
    *,
    rows_per_step: int | None = None,
    gigabytes_per_second: float | tuple[float, float] | None = None,
) -> CommunicationPlan:
    """Plans a training step's communication without running the step.

    Traces the optimizer's step under its strategy, and records each collective
    as it is created. Builds the optimizer if it has not been built. To build an
    optimizer of several processes, call the function in all of them.

    Args:
      model: A compiled and built model, or a tf_xshard optimizer. Also a model
        or an optimizer of tf_keras that `tf_xshard.tf_keras` gave an
        aggregator; pass `variables` with the optimizer. The plan has the
        model's gradients (dense, IndexedSlices or None), as if each output
        had a loss, and one call of each `GlobalMean`. Gradients of an
        optimizer, or of a model without `inputs` (a subclass with its own
        `call`), are assumed to be dense.
      variables: A list of the variables to train, for an optimizer only. None
        (default) for the variables that the optimizer was built with.
      rows_per_step: The number of different rows of an Embedding in a replica's
        batch, an int >= 1. The optimizer knows it only when a step runs. None
        (default) if no gradient is IndexedSlices.
      gigabytes_per_second: The speed of a link, to show the time without
        compute. A number > 0, or a pair for links within a host and across
        hosts; each process counts as a host. None (default) for no time.

    Returns:
      A `CommunicationPlan` with `operations`, `bytes_per_step`,
      `bytes_sent_per_step`, `slot_bytes` and other attributes. `print` shows it
      as a table.

    Raises:
      RuntimeError: If the function is called inside `strategy.run`.
      TypeError: If an argument has the wrong type.
      ValueError: If the model is not compiled with a tf_xshard optimizer, has
        not been built, or has an Embedding and `rows_per_step` is None.

    Example:

    >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Input((3,)),
    ...                               keras.layers.Dense(2)])
    ...     model.compile(tf_xshard.CrossShardOptimizer(
    ...         keras.optimizers.SGD()), "mse")
    >>> plan = tf_xshard.communication_plan(model)
    >>> int(plan.bytes_per_step), plan.operations[0].num_variables
    (32, 2)

    Source: Patarasuk and Yuan, 2009, for the bytes that a ring sends.
    """
    site_lib.refuse_replica_context("communication_plan()")
    speeds = _speeds(gigabytes_per_second)
    if rows_per_step is not None:
        checks.positive_integer("rows_per_step", rows_per_step)
    planned = step_lib.of(model, variables)
    strategy = planned.strategy
    with strategy.scope():
        planned.build()

    def on_replica(features: Any) -> None:
        with recorder.recorded(found):
            planned.on_replica(features)

    found: recorder.Found = []
    step = tf.function(
        lambda features: strategy.run(on_replica, (features,)), autograph=False
    )
    with planned.unchanged(), recorder.recorded(found):
        step.get_concrete_function(planned.inputs)
    first = min((r for _, r in found if r is not None), default=None)
    collectives = [one for one, r in found if r == first]
    num_local = strategy.num_replicas_in_sync
    if site_lib.spans_processes(strategy):
        num_local = len(strategy.extended.worker_devices)
    operations = tuple(
        _planned(one, rows_per_step, speeds, num_local) for one in collectives
    )
    return CommunicationPlan(
        operations,
        strategy.num_replicas_in_sync,
        _bytes_on_a_replica(planned.state()),
        sum(one.num_bytes for one in operations if one.num_variables > 1),
        speeds,
        planned.balance(),
    )


def _planned(
    collective: recorder.Collective,
    rows: int | None,
    speeds: tuple[Any, Any] | None,
    num_local: int,
) -> PlannedOperation:
    num_bytes = collective.num_bytes
    if num_bytes is None:
        if rows is None:
            raise ValueError(
                "communication_plan(): a gradient is IndexedSlices (an"
                " Embedding), whose rows are only known when a step runs. Pass"
                " rows_per_step, the number of different rows in a replica's"
                " batch."
            )
        # The collective pads the rows to a power of two.
        num_bytes = collective.bytes_per_row * (1 << (rows - 1).bit_length())
    groups = collective.groups
    sent = recorder.bytes_sent(
        collective.operation, num_bytes, groups.group_size
    )
    seconds = None
    if speeds is not None:
        across = any(
            len({replica // num_local for replica in members}) > 1
            for members in groups
        )
        seconds = sent / (speeds[across] * _BYTES_PER_GIGABYTE)
    known = {**vars(collective), "num_bytes": num_bytes}
    return PlannedOperation(**known, bytes_sent=sent, seconds=seconds)


def _speeds(value: Any) -> tuple[Any, Any] | None:
    if value is None:
        return None
    pair = (value, value) if isinstance(value, numbers.Real) else value
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            "gigabytes_per_second must be a number or a pair (within a host,"
            f" across hosts), got {value!r}."
        )
    for speed in pair:
        checks.positive_number("gigabytes_per_second", speed)
    return pair[0], pair[1]


def _bytes_on_a_replica(variables: Sequence) -> int:
    # Several slot variables may be parts of one TensorFlow variable.
    held = {
        id(one): one
        for one in map(replica_variables.tensorflow_variable, variables)
    }
    return sum(
        one.dtype.size * (tf.TensorShape(one.shape).num_elements() or 0)
        for one in held.values()
    )
