"""Finds the workers that the others wait for, for errors after a timeout.

A worker that has waited for a while says so in the cluster's key-value store.
The first worker whose time is up reads who else waits, and names the rest.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_xshard.private.tensorflow import runtime

# The store is on the leader, and a call hangs while the leader is stopped.
_SECONDS_PER_CALL = 5.0
_SECONDS_PER_ANSWER = 0.2
_MOST_NAMES = 5


def say_waits(key: str, rank: int) -> None:
    """Tells the other workers that this one waits."""
    _call(lambda: runtime.publish(f"{key}/{rank}", ""))


def say_continues(key: str, rank: int) -> None:
    """Takes `say_waits` back."""
    _call(lambda: runtime.withdraw(f"{key}/{rank}"))


def silent(key: str, ranks: Sequence[int]) -> list[int]:
    """Asks which workers do not wait."""
    found: list[int] = []

    def ask() -> None:
        for rank in ranks:
            try:
                runtime.lookup(f"{key}/{rank}", _SECONDS_PER_ANSWER)
            except tf.errors.DeadlineExceededError:
                found.append(rank)

    # Without an answer, the leader is silent. Of many, some names are enough.
    return list(found) if _call(ask) or found else [0]


def named(ranks: Sequence[int]) -> str:
    """Lists workers for an error, with their addresses."""
    names = [runtime.worker(rank) for rank in ranks[:_MOST_NAMES]]
    if len(ranks) > _MOST_NAMES:
        names.append(f"and {len(ranks) - _MOST_NAMES} more")
    return ", ".join(names)


def _call(function: Callable[[], None]) -> bool:
    """Calls a function; returns False if the leader did not answer in time."""
    ended = []

    def call() -> None:
        with contextlib.suppress(tf.errors.OpError):
            function()
            ended.append(True)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(_SECONDS_PER_CALL)
    return bool(ended)
