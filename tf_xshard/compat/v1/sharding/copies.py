"""Maps shard 0's variables to the other shards' copies.

Also records the shard of each optimizer. An optimizer that several shards
shared would count all their updates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_xshard.private.tensorflow import v1 as tensorflow_v1


def of(graph: tf.Graph) -> ShardCopies:
    """Returns the graph's `ShardCopies`, shared by all calls of `shard`."""
    return tensorflow_v1.kept_by(graph, "tf_xshard_shard_copies", ShardCopies)


class ShardCopies:
    """Maps the variables of shard 0 to the other shards' copies."""

    def __init__(self) -> None:
        # Maps the id of a variable of shard 0 to the variable.
        self._originals: dict[int, tf.Variable] = {}
        # Maps the id of a variable of shard 0 to {index of a shard: copy}.
        self._copies: dict[int, dict[int, tf.Variable]] = {}
        # Maps the id of a copy to (variable of shard 0, index of the shard).
        self._original_of: dict[int, tuple[tf.Variable, int]] = {}
        # Maps the id of a copy to the copy's own name.
        self._own_names: dict[int, str] = {}
        # Maps the id of an optimizer to (optimizer, index of its shard).
        self._owners: dict[int, tuple[Any, int]] = {}

    def add_original(self, variable: tf.Variable) -> None:
        """Records a variable that shard 0 has made."""
        self._originals[id(variable)] = variable
        self._copies[id(variable)] = {}

    def add_copy(
        self, original: tf.Variable, index: int, variable: tf.Variable
    ) -> None:
        """Records shard `index`'s copy of a variable."""
        self._copies[id(original)][index] = variable
        self._own_names[id(variable)] = variable.name
        self._original_of[id(variable)] = original, index

    def is_of(self, variable: tf.Variable, index: int) -> bool:
        """Returns True if shard `index` has made the variable."""
        if index == 0:
            return id(variable) in self._originals
        return self._original_of.get(id(variable), (None, None))[1] == index

    def show_plain_names(self, shown: bool) -> None:
        """Shows shard 0's names for copies, or their own names again."""
        # A computation can select variables by their names, as in
        # `tf.trainable_variables("generator")` or `variable.name.startswith`.
        for original, copy in self.pairs():
            name = original.name if shown else self._own_names[id(copy)]
            tensorflow_v1.show_name(copy, name)

    def is_any(self, handle: tf.Tensor) -> bool:
        """Returns True if a shard made the variable that has this resource."""
        return any(
            handle is variable.handle
            for pair in self.pairs()
            for variable in pair
        ) or any(handle is one.handle for one in self._originals.values())

    def key(self, variable: tf.Variable) -> int:
        """Returns one key for a variable of shard 0 and all its copies."""
        original, _ = self._original_of.get(id(variable), (variable, 0))
        return id(original)

    def missing(self, index: int) -> list[tf.Variable]:
        """Lists shard 0's variables that a shard has not copied, in order."""
        return [
            variable
            for number, variable in self._originals.items()
            if index not in self._copies[number]
        ]

    def pairs(self) -> Iterator[tuple[tf.Variable, tf.Variable]]:
        """Yields (variable of shard 0, copy) for every copy."""
        for number, copies in self._copies.items():
            for copy in copies.values():
                yield self._originals[number], copy

    def original_for(
        self, name: str, name_scope: str, index: int
    ) -> tf.Variable:
        """Finds the variable of shard 0 that a shard is about to copy."""
        prefix = f"shard_{index}/"
        # The name of a slot variable ends with a slash.
        plain = name.rstrip("/").removeprefix(prefix)
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
        """Replaces variables in collections with one shard's copies."""
        return {
            name: [
                self._copies.get(id(value), {}).get(index, value)
                for value in values
            ]
            for name, values in collections.items()
        }

    def owner(self, optimizer: Any, index: int) -> int:
        """Returns an optimizer's first shard, or makes `index` the first."""
        return self._owners.setdefault(id(optimizer), (optimizer, index))[1]


def _plain_name(variable: tf.Variable) -> str:
    return variable.name.split(":")[0]


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name.split("/")[-1])
