"""Defines which replicas communicate, how, and under which number."""

from __future__ import annotations

import dataclasses
import threading
import weakref

from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib

_lock = threading.RLock()
_taken: set[int] = set()


@dataclasses.dataclass(frozen=True)
class Channel:
    """Groups of replicas, how they communicate, and a number.

    No other channel in use has the same `number`, which comes from
    `number_for`. It is 0 for collectives that only run while no others do.
    """

    groups: group_assignment_lib.GroupAssignment
    communication: communication_lib.Communication
    number: int = 0

    def over_all(self) -> Channel:
        """Returns the same channel for one group of all replicas."""
        groups = group_assignment_lib.GroupAssignment.single(
            self.groups.num_replicas
        )
        return dataclasses.replace(self, groups=groups)

    def exact(self) -> Channel:
        """Returns the same channel for values that must arrive unchanged."""
        return dataclasses.replace(
            self, communication=self.communication.exact()
        )


def number_for(holder: object) -> int:
    """Returns the smallest positive number that no other living object has."""
    # TensorFlow keeps keys and counters of collectives forever, so numbers are
    # reused when their holders are garbage collected.
    with _lock:
        number = next(n for n in range(1, len(_taken) + 2) if n not in _taken)
        _taken.add(number)
    weakref.finalize(holder, _taken.discard, number)
    return number
