"""Which variable of which shard is a copy of which variable of shard 0.

Also which shard an optimizer works for: one that several shards share would
count their updates together.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_by_graph = weakref.WeakKeyDictionary()


def of(graph: tf.Graph) -> ShardCopies:
    """The one of a graph, for all calls of `shard` in it."""
    if graph not in _by_graph:
        _by_graph[graph] = ShardCopies()
    return _by_graph[graph]


class ShardCopies:
    """Shard 0's variables, and the other shards' copies of them."""

    def __init__(self):
        self._originals = {}  # id of a variable of shard 0: it
        self._copies = {}  # id of it: {shard's index: the copy}
        self._original_of = {}  # id of a copy: (original, shard's index)
        self._owners = {}  # id of an optimizer: (it, the shard's index)

    def add_original(self, variable) -> None:
        """Remembers a variable that shard 0 has made."""
        self._originals[id(variable)] = variable
        self._copies[id(variable)] = {}

    def add_copy(self, original, index: int, variable) -> None:
        """Remembers shard `index`'s copy of a variable."""
        self._copies[id(original)][index] = variable
        self._original_of[id(variable)] = original, index

    def is_of(self, variable, index: int) -> bool:
        """Whether a shard has made a variable."""
        if index == 0:
            return id(variable) in self._originals
        return self._original_of.get(id(variable), (None, None))[1] == index

    def key(self, variable) -> int:
        """Equal for a variable of shard 0 and all copies of it."""
        original, _ = self._original_of.get(id(variable), (variable, 0))
        return id(original)

    def missing(self, index: int) -> list:
        """Variables of shard 0 of which a shard has no copy, in order."""
        return [
            variable
            for number, variable in self._originals.items()
            if index not in self._copies[number]
        ]

    def pairs(self) -> Iterator[tuple]:
        """(variable of shard 0, copy) for all copies."""
        for number, copies in self._copies.items():
            for copy in copies.values():
                yield self._originals[number], copy

    def original_for(self, name: str, name_scope: str, index: int) -> Any:
        """The variable that a shard is about to copy.

        Args:
          name: The name that the shard asks for.
          name_scope: The name scope in which it does.
          index: The shard's index.

        Returns:
          A variable of shard 0, which the shard has no copy of: the one of that
          name, or else the next whose name differs only by the number that
          makes it unique.

        Raises:
          ValueError: If there is none.
        """
        prefix = f"shard_{index}/"
        plain = name.rstrip("/").removeprefix(prefix)  # A slot has a slash.
        scope = f"{name_scope}/".removeprefix(prefix)
        missing = self.missing(index)
        for wanted in (plain, f"{scope}{plain}"):
            for variable in missing:
                if _name(variable) == wanted:
                    return variable
        for variable in missing:
            if _without_number(_name(variable)) == _without_number(plain):
                return variable
        raise ValueError(
            f"Shard {index} makes variable {plain!r}, which shard 0 has not"
            " made. All shards must run the same computation."
        )

    def translated(self, collections: dict, index: int) -> dict:
        """A graph's collections as a shard sees them: with its copies."""
        return {
            name: [
                self._copies.get(id(value), {}).get(index, value)
                for value in values
            ]
            for name, values in collections.items()
        }

    def owner(self, optimizer, index: int) -> int:
        """The first shard that used an optimizer: `index`, if none has."""
        return self._owners.setdefault(id(optimizer), (optimizer, index))[1]


def _name(variable) -> str:
    return variable.name.split(":")[0]


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name.split("/")[-1])
