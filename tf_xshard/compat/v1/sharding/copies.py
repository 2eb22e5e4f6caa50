"""Which variables are the shards' copies of which variables of shard 0.

Also which shard an optimizer belongs to: if several shards shared one, it would
count all their updates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_xshard.private.tensorflow import v1 as tensorflow_v1


def of(graph: tf.Graph) -> ShardCopies:
    """The `ShardCopies` of a graph, for all calls of `shard` in it."""
    return tensorflow_v1.kept_by(graph, "tf_xshard_shard_copies", ShardCopies)


class ShardCopies:
    """Shard 0's variables, and the other shards' copies of them."""

    def __init__(self) -> None:
        # Shard 0's variables, by id.
        self._originals: dict[int, tf.Variable] = {}
        # For each of their ids: {shard's index: the copy}.
        self._copies: dict[int, dict[int, tf.Variable]] = {}
        # By a copy's id: (original, shard's index).
        self._original_of: dict[int, tuple[tf.Variable, int]] = {}
        # The copies' own names, by their ids.
        self._own_names: dict[int, str] = {}
        # By an optimizer's id: (the optimizer, shard's index).
        self._owners: dict[int, tuple[Any, int]] = {}

    def add_original(self, variable: tf.Variable) -> None:
        """Remembers a variable that shard 0 has made."""
        self._originals[id(variable)] = variable
        self._copies[id(variable)] = {}

    def add_copy(
        self, original: tf.Variable, index: int, variable: tf.Variable
    ) -> None:
        """Remembers shard `index`'s copy of a variable."""
        self._copies[id(original)][index] = variable
        self._own_names[id(variable)] = variable.name
        self._original_of[id(variable)] = original, index

    def is_of(self, variable: tf.Variable, index: int) -> bool:
        """Whether a shard has made a variable."""
        if index == 0:
            return id(variable) in self._originals
        return self._original_of.get(id(variable), (None, None))[1] == index

    def show_plain_names(self, shown: bool) -> None:
        """Gives copies the name of shard 0's variable, or their own again.

        A computation selects variables by their names (`tf.trainable_variables(
        "generator")`, `variable.name.startswith`).
        """
        for original, copy in self.pairs():
            name = original.name if shown else self._own_names[id(copy)]
            tensorflow_v1.show_name(copy, name)

    def is_any(self, handle: tf.Tensor) -> bool:
        """Whether a resource is that of a variable made by a shard."""
        return any(
            handle is variable.handle
            for pair in self.pairs()
            for variable in pair
        ) or any(handle is one.handle for one in self._originals.values())

    def key(self, variable: tf.Variable) -> int:
        """Equal for a variable of shard 0 and all copies of it."""
        original, _ = self._original_of.get(id(variable), (variable, 0))
        return id(original)

    def missing(self, index: int) -> list[tf.Variable]:
        """Variables of shard 0 of which a shard has no copy, in order."""
        return [
            variable
            for number, variable in self._originals.items()
            if index not in self._copies[number]
        ]

    def pairs(self) -> Iterator[tuple[tf.Variable, tf.Variable]]:
        """(variable of shard 0, copy) for all copies."""
        for number, copies in self._copies.items():
            for copy in copies.values():
                yield self._originals[number], copy

    def original_for(
        self, name: str, name_scope: str, index: int
    ) -> tf.Variable:
        """The variable that a shard is about to copy."""
        prefix = f"shard_{index}/"
        plain = name.rstrip("/").removeprefix(prefix)  # A slot has a slash.
        scope = f"{name_scope}/".removeprefix(prefix)
        missing = self.missing(index)
        for wanted in (plain, f"{scope}{plain}"):
            for variable in missing:
                if _plain_name(variable) == wanted:
                    return variable
        for variable in missing:
            if _without_number(_plain_name(variable)) == _without_number(plain):
                return variable
        raise ValueError(
            f"Shard {index} makes variable {plain!r}, which shard 0 has not"
            " made. All shards must run the same computation."
        )

    def translated(
        self, collections: dict[str, list[Any]], index: int
    ) -> dict[str, list[Any]]:
        """A graph's collections with one shard's copies of the variables."""
        return {
            name: [
                self._copies.get(id(value), {}).get(index, value)
                for value in values
            ]
            for name, values in collections.items()
        }

    def owner(self, optimizer: Any, index: int) -> int:
        """The first shard that used an optimizer; now `index`, if none did."""
        return self._owners.setdefault(id(optimizer), (optimizer, index))[1]


def _plain_name(variable: tf.Variable) -> str:
    return variable.name.split(":")[0]


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name.split("/")[-1])
