"""Decides which wrapper of a stack reduces, where, and which one undoes 1/N.

The decision depends on the outermost optimizer: one that was inside a
TowerOptimizer may later be used alone. So each call of an outermost optimizer
decides again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.optimizers import tree

# `root` is the outermost wrapper that runs in the thread.
_thread = threading.local()


@dataclasses.dataclass(frozen=True)
class Place:
    """What a wrapper does in a stack.

    Attributes:
      is_outermost: Whether no other wrapper is around it, so that it undoes
        what is undone once.
      group_assignment: The groups over which it reduces; None for one group of
        all replicas.
      is_redundant: Whether another wrapper reduces in its place.
    """

    is_outermost: bool
    group_assignment: group_assignment_lib.GroupAssignment | None
    is_redundant: bool = False


def places(root: Any) -> list[tuple[Any, Place]]:
    """Every wrapper of a stack with its place, the outermost first.

    Args:
      root: The outermost optimizer.

    Returns:
      Pairs of a wrapper and its `Place`.
    """
    return list(_places(root, True, None))


def _places(
    optimizer: Any, is_outermost: bool, around: Place | None
) -> Iterator[tuple[Any, Place]]:
    """Yields the places of an optimizer's wrappers.

    Args:
      optimizer: An optimizer.
      is_outermost: Whether no wrapper is around it.
      around: The place of the nearest wrapper around it that has a reducer of
        its own; None if there is none.
    """
    if tree.is_wrapper(optimizer):
        place = _place(optimizer, is_outermost, around)
        yield optimizer, place
        is_outermost = False
        if optimizer.has_own_reducer:
            around = place
    for child in tree.children(optimizer):
        yield from _places(child, is_outermost, around)


def _place(wrapper: Any, is_outermost: bool, around: Place | None) -> Place:
    role = wrapper._reducer.role
    own = wrapper._reducer.given_assignment
    if not wrapper.has_own_reducer or role == "explicit":
        return Place(is_outermost, own)
    if around is not None:
        return Place(is_outermost, around.group_assignment, role == "stand_in")
    inside = tree.wrappers(wrapper)[1:]
    if role == "stand_in" and inside:
        first = _place(inside[0], False, None)
        return Place(is_outermost, first.group_assignment, True)
    return Place(is_outermost, own)


def settle(root: Any) -> None:
    """Gives every wrapper of a stack its place.

    Args:
      root: The outermost optimizer.
    """
    for wrapper, place in places(root):
        wrapper._take(place)


@contextlib.contextmanager
def call_of(wrapper: Any) -> Iterator[None]:
    """A context in which a wrapper runs, and those inside it have their place.

    Args:
      wrapper: The wrapper; the outermost one, unless another one calls it.

    Yields:
      None.
    """
    before = getattr(_thread, "root", None)
    if before is not None and _is_inside(wrapper, before):
        yield
        return
    settle(wrapper)
    _thread.root = wrapper
    try:
        yield
    finally:
        _thread.root = before


def settle_again(wrapper: Any) -> None:
    """`settle` for the stack of a wrapper that has built what is inside.

    A MultiOptimizer may have created some of it.
    """
    root = getattr(_thread, "root", None)
    settle(root if root is not None and _is_inside(wrapper, root) else wrapper)


def _is_inside(wrapper: Any, root: Any) -> bool:
    return any(one is wrapper for one in tree.with_local_optimizers(root))
