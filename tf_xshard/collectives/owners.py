"""Distinct numbers for the objects that run collectives in one process."""

from __future__ import annotations

import threading
import weakref

_lock = threading.RLock()
_taken: set[int] = set()


def number_for(owner: object) -> int:
    """The smallest positive number that no other living object has.

    Keys and counters of collectives are kept for ever, so numbers are reused.
    """
    with _lock:
        number = next(n for n in range(1, len(_taken) + 2) if n not in _taken)
        _taken.add(number)
    weakref.finalize(owner, _taken.discard, number)
    return number
