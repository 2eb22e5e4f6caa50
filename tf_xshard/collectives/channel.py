"""Who communicates with whom, how, and under which number."""

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
    """Groups, how they communicate, and a number: all that a transport needs.

    Attributes:
      groups: Which replicas communicate with which.
      communication: How they communicate.
      number: A number, from `number_for`, that no other channel in use has. 0
        for what only runs while nothing else does.
    """

    groups: group_assignment_lib.GroupAssignment
    communication: communication_lib.Communication
    number: int = 0

    def over_all(self) -> Channel:
        """The same for one group of all replicas."""
        groups = group_assignment_lib.GroupAssignment.single(
            self.groups.num_replicas
        )
        return dataclasses.replace(self, groups=groups)

    def exact(self) -> Channel:
        """The same for values that must arrive as they are."""
        return dataclasses.replace(
            self, communication=self.communication.exact()
        )


def number_for(holder: object) -> int:
    """The smallest positive number that no other living object has.

    Keys and counters of collectives are kept for ever, so numbers are reused
    when their holders are garbage collected.
    """
    with _lock:
        number = next(n for n in range(1, len(_taken) + 2) if n not in _taken)
        _taken.add(number)
    weakref.finalize(holder, _taken.discard, number)
    return number
