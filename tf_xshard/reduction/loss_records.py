"""Hands the number of a loss' items from its gradient to the next step.

An optimizer gets gradients, and not the loss. To combine the gradients of
several calls, a TowerOptimizer needs the number by which each call's loss was
divided. `GlobalMean` records the number when it is differentiated, and the next
`apply` of the same replica takes the record.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Sequence

import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import site as site_lib


@dataclasses.dataclass(frozen=True)
class LossRecord:
    """A loss that has been differentiated on one replica.

    Attributes:
      name: The name of the loss.
      groups: The groups over which its items were counted.
      num_items: The number of items of this replica's group, a scalar tensor;
        None for a loss that is a sum.
      items_per_row: The number of items of each row if all rows have equally
        many. Else None.
      graph: The graph of `num_items`; None in eager mode.
      outermost: The graph of the outermost function around it.
    """

    name: str
    groups: group_assignment_lib.GroupAssignment
    num_items: tf.Tensor | None
    items_per_row: int | None
    graph: tf.Graph | None
    outermost: tf.Graph | None


# Without an optimizer that takes them, records would pile up in eager mode.
_MOST_RECORDS = 1000
_lock = threading.Lock()
_records: dict[tuple, collections.deque] = {}


def _key(site: site_lib.Site) -> tuple:
    # A strategy may run the loss and the optimizer in two threads.
    if site.num_replicas > 1:
        return id(site.strategy), site.replica_id
    return (threading.get_ident(),)


def add(record: LossRecord, site: site_lib.Site) -> None:
    """Adds a record of this replica."""
    with _lock:
        records = _records.setdefault(
            _key(site), collections.deque(maxlen=_MOST_RECORDS)
        )
        # Records of another graph belong to a step that was never applied.
        if records and records[-1].outermost is not record.outermost:
            records.clear()
        records.append(record)


def take(site: site_lib.Site) -> list[LossRecord]:
    """Removes and returns this replica's records since the last call."""
    outermost = site_lib.outermost_graph()
    with _lock:
        records = _records.pop(_key(site), ())
    # A step that was traced before, and not applied, left its records.
    return [one for one in records if outermost in (None, one.outermost)]


def common_num_items(records: Sequence[LossRecord]) -> tf.Tensor | None:
    """Returns the number of items of the losses of one call.

    None if there are no records, or if the losses are sums.
    """
    if any(one.graph is not site_lib.function_graph() for one in records):
        raise ValueError(
            f"The gradient of {_names(records)} was computed in another"
            " tf.function than the one that applies it, where the number of its"
            " items can't be read. Compute and apply it in one function."
        )
    numbers = [one.num_items for one in records]
    # Numbers of items that are multiples of the number of rows give the calls
    # of a round the same relative weights.
    if (
        all(one is None for one in numbers)
        or len(numbers) == 1
        or (all(one.items_per_row for one in records))
    ):
        return numbers[0] if numbers else None
    raise ValueError(
        f"A TowerOptimizer weights each call by the number of its loss' items,"
        f" but the gradients of this call belong to {_names(records)}, whose"
        " numbers of items may differ (masks, weights, or a loss that is a"
        " sum). Combine the losses in one GlobalMean, or give all the same mask"
        " and weights and accumulate with the inner optimizer's"
        " gradient_accumulation_steps."
    )


def num_items_of_towers(
    records: Sequence[LossRecord], num_towers: int
) -> list[tf.Tensor] | None:
    """Returns `common_num_items` of each tower, for towers in one step.

    The gradients of one tower were computed after those of the other.
    """
    if not records:
        return None
    if len(records) % num_towers:
        raise ValueError(
            f"The gradients of {num_towers} towers are of {len(records)}"
            f" GlobalMean losses, {_names(records)}. Each tower needs the same"
            " losses. Compute their gradients one after the other, or pass"
            " apply_towers(..., weights=...)."
        )
    size = len(records) // num_towers
    numbers = [
        common_num_items(records[first : first + size])
        for first in range(0, len(records), size)
    ]
    return None if numbers[0] is None else numbers


def _names(records: Sequence[LossRecord]) -> str:
    return ", ".join(f"GlobalMean({one.name})" for one in records)
