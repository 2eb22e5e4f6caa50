"""Passes the number of a loss's items from its gradient to the next step.

An optimizer gets gradients, and not the loss. To combine the gradients of
several calls, a TowerOptimizer needs the number by which each call's loss was
divided. `GlobalMean` records the number when it is differentiated, and the next
`apply` of the same replica takes the record.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import site as site_lib
from tf_xshard.private.tensorflow import tracing


@dataclasses.dataclass(frozen=True)
class LossRecord:
    """Describes a loss that has been differentiated on one replica.

    Attributes:
      name: The name of the loss.
      groups: The groups over which its items were counted.
      num_items: The number of items of this replica's group, a scalar tensor;
        None for a loss that is a sum.
      num_rows: The number of rows, an int or a scalar tensor, if each row has
        the same number of items. Else None.
      graph: The graph of `num_items`; None in eager mode.
      outermost: The graph of the outermost function around it.
    """

    name: str
    groups: group_assignment_lib.GroupAssignment
    num_items: tf.Tensor | None
    num_rows: Any
    graph: tf.Graph | None
    outermost: tf.Graph | None


# Without an optimizer that takes them, records would pile up in eager mode.
_MOST_RECORDS = 1000
_lock = threading.Lock()


class _OfReplica:
    """Holds functions that return the records of one replica.

    A function returns None if the record's graph does not exist anymore.
    """

    def __init__(self) -> None:
        self.held: collections.deque[Callable[[], LossRecord | None]] = (
            collections.deque(maxlen=_MOST_RECORDS)
        )
        # Returns the outermost function in which the last records were taken.
        self.taken_in: Callable[[], tf.Graph | None] = lambda: None

    def records(self) -> list[LossRecord]:
        """Returns the records whose graphs still exist."""
        found = (held() for held in self.held)
        return [one for one in found if one is not None]


_replicas: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _of(site: site_lib.Site) -> _OfReplica:
    of_strategy = _replicas.setdefault(site.strategy, {})
    # A strategy may run the loss and the optimizer in two threads.
    key = site.replica_id if site.num_replicas > 1 else threading.get_ident()
    return of_strategy.setdefault(key, _OfReplica())


def add(record: LossRecord, site: site_lib.Site) -> None:
    """Adds a record of this replica."""
    with _lock:
        own = _of(site)
        records = own.records()
        # Records of another graph belong to a step that was never applied.
        if records and records[-1].outermost is not record.outermost:
            own.held.clear()
            records = []
        # A persistent tape may differentiate one loss several times.
        if any(one is record for one in records):
            return
        # A graph keeps a record as long as its gradient. A record that no
        # optimizer takes must not keep its graph.
        in_graph = record.outermost is not None
        own.held.append(weakref.ref(record) if in_graph else lambda: record)


def take(site: site_lib.Site) -> list[LossRecord]:
    """Removes and returns this replica's records since the last call."""
    outermost = site_lib.outermost_graph()
    with _lock:
        own = _of(site)
        # Drop the records that an earlier, unapplied trace left.
        found = [
            one for one in own.records() if outermost in (None, one.outermost)
        ]
        own.held.clear()
        if found and outermost is not None:
            own.taken_in = weakref.ref(outermost)
    return found


def were_taken(site: site_lib.Site) -> bool:
    """Returns whether records were taken in the function being traced."""
    outermost = site_lib.outermost_graph()
    with _lock:
        return outermost is not None and _of(site).taken_in() is outermost


def common_num_items(records: Sequence[LossRecord]) -> tf.Tensor | None:
    """Returns the number of items of the losses of one call.

    Returns None if there are no records, or if the losses are sums.
    """
    if any(one.graph is not site_lib.function_graph() for one in records):
        raise ValueError(
            f"The gradient of {_names(records)} was computed in another"
            " tf.function than the one that applies it, so the number of items"
            " can't be read. Compute and apply the gradient in one tf.function."
        )
    numbers = [one.num_items for one in records]
    if len(numbers) < 2 or all(one is None for one in numbers):
        return numbers[0] if numbers else None
    # Multiples of one number of rows give the calls of a round the same
    # relative weights.
    rows = [one.num_rows for one in records]
    known = {one for one in rows if isinstance(one, int)}
    if any(one is None for one in rows) or len(known) > 1:
        raise ValueError(
            "A TowerOptimizer weights each call by the number of its loss'"
            f" items, but the gradients of this call belong to"
            f" {_names(records)}, whose numbers of items may differ (rows,"
            " masks, weights, or a loss that is a sum). Combine the losses in"
            " one GlobalMean, or compute all of them on the same rows, without"
            " masks or weights."
        )
    with tf.control_dependencies(_asserted_equal(rows)):
        return tf.identity(numbers[0])


def _asserted_equal(rows: Sequence) -> list:
    """Asserts that losses have the same number of rows, except in XLA."""
    if tracing.in_xla():
        return []
    return [
        tf.debugging.assert_equal(
            tf.cast(one, tf.int64),
            tf.cast(rows[0], tf.int64),
            "The losses of a TowerOptimizer's call have different numbers of"
            " rows, so their numbers of items differ. Compute all of them on"
            " the same rows.",
        )
        for one in rows[1:]
    ]


def num_items_of_towers(
    records: Sequence[LossRecord], num_towers: int
) -> list[tf.Tensor] | None:
    """Returns `common_num_items` of each tower, for towers in one step.

    Compute the gradients of each tower before the gradients of the next tower.
    """
    if not records:
        return None
    if len(records) % num_towers:
        raise ValueError(
            f"Got gradients of {len(records)} GlobalMean losses"
            f" ({_names(records)}) for {num_towers} towers. Each tower needs"
            " the same losses. Compute the gradients one tower after the other,"
            " or pass apply_towers(..., weights=...)."
        )
    size = len(records) // num_towers
    numbers = [
        common_num_items(records[first : first + size])
        for first in range(0, len(records), size)
    ]
    return None if numbers[0] is None else numbers


def _names(records: Sequence[LossRecord]) -> str:
    return ", ".join(f"GlobalMean({one.name})" for one in records)
