"""The shards of one computation, traced into one graph.

Shard 0 is traced by the caller's thread, each other shard by a thread of its
own; see `traced_shard`. Between two exchanges the shards run one by one:

shard 0   runs | gather: resume 1, resume 2, combine | runs | ended
shard 1        |         runs to exchange            |      | runs, ends
shard 2        |                   runs to exchange  |      |      runs, ends
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.compat.v1 import shard_copies
from tf_xshard.compat.v1 import shared_variables
from tf_xshard.compat.v1 import traced_shard
from tf_xshard.private import tensorflow_v1

# The collection of the shards' copies of variables, without shard 0's.
SHARD_VARIABLES = "shard_variables"

# What shards add to these belongs to the graph, and not to one shard's view.
_SHARED_COLLECTIONS = (
    tf.compat.v1.GraphKeys.TABLE_INITIALIZERS,
    tf.compat.v1.GraphKeys.QUEUE_RUNNERS,
)


class Team:
    """The shards of one call of `shard`.

    Args:
      devices: A device name for each shard; None leaves its device open.

    Attributes:
      graph: The graph into which they are traced.
      is_legacy_graph: Whether it is a `tf.Graph` that a session runs, and not
        the graph of a `tf.function`.
      copies: The graph's `ShardCopies`.
      devices: A device name for each shard, or None.
      variable_scope: The variable scope around `shard`.
      name_scope: The name scope around `shard`.
      cancelled: Whether all shards have ended or must end.
      start: A list of one operation, after which all others of all shards run.
      outer_device: The device scope around `shard`, or None.
      initial_collections: The graph's collections before the first shard.
      shards: The shards.
    """

    def __init__(self, devices: Sequence[str | None]) -> None:
        self.graph = tf.compat.v1.get_default_graph()
        self.is_legacy_graph = not isinstance(
            self.graph, tf.__internal__.FuncGraph
        )
        self.copies = shard_copies.of(self.graph)
        self.devices = devices
        self.variable_scope = tf.compat.v1.get_variable_scope()
        self.name_scope = self.graph.get_name_scope()
        self.cancelled = False
        start = tf.no_op("shards_start")
        self.start = [start]
        self.outer_device = start.device or None
        self.initial_collections = self._collections()
        self._outside = [
            variable
            for variable in (
                tf.compat.v1.global_variables() + tf.compat.v1.local_variables()
                if self.is_legacy_graph
                else []
            )
            if not self.copies.is_of(variable, 0)
        ]
        self._num_before = len(self.graph.get_operations())
        self.shards = [traced_shard.Shard(i, self) for i in range(len(devices))]

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return len(self.shards)

    def is_shared(self, name: str) -> bool:
        """Whether a variable was made outside of all computations."""
        return any(
            one.op.name == name or one.op.name.startswith(f"{name}/part_")
            for one in self._outside
        )

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Traces the computation of all shards.

        Args:
          function: The computation, a function of the shard's index.

        Returns:
          What it returned, for each shard.

        Raises:
          ValueError: If shards apply gradients a different number of times.
        """
        first, *others = self.shards
        if self.is_legacy_graph:
            self.graph.switch_to_thread_local()
            for original, copy in self.copies.pairs():
                self.initialize_first(copy, original)
        for shard in others:
            shard.start(function, tensorflow_v1.thread_state(self.graph))
        self.copies.show_plain_names(True)
        try:
            with tensorflow_v1.collections_by_plain_names(
                self.graph, lambda name: re.sub(r"^shard_\d+/", "", name)
            ):
                first.run_here(function)
                for shard in others:
                    shard.resume()
            waiting = [s.index for s in others if not s.done]
            if waiting:
                raise _unequal(waiting)
        finally:
            self.cancelled = True
            for shard in others:
                if not shard.done:
                    shard.resume()
            self.copies.show_plain_names(False)
        self._separate_shared_variables()
        known = tf.compat.v1.get_collection_ref(SHARD_VARIABLES)
        known[:] = [copy for _, copy in self.copies.pairs()]
        return [shard.result for shard in self.shards]

    def _separate_shared_variables(self) -> None:
        if not self.is_legacy_graph:
            for shard in self.shards[1:]:
                shared_variables.refuse_assignments(
                    self.graph, shard.operations, self.copies.is_any
                )
            return
        if not self._outside:
            return
        operations = {shard.index: shard.operations for shard in self.shards}
        others = {one for of_shard in operations.values() for one in of_shard}
        made = self.graph.get_operations()[self._num_before :]
        operations[0] = [one for one in made if one not in others]
        shared_variables.separate(self._outside, operations, self.start[0])

    def gather(self, combine: Callable[[list[Any]], list[Any]]) -> Any:
        """In shard 0: runs all others up to the same exchange.

        Args:
          combine: See `Shard.exchange`.

        Returns:
          What shard 0 gets.

        Raises:
          ValueError: If a shard ends without it.
        """
        for shard in self.shards[1:]:
            shard.resume()
        done = [shard.index for shard in self.shards if shard.done]
        if done:
            raise _unequal([0])
        results = combine([shard.contribution for shard in self.shards])
        for shard, result in zip(self.shards, results, strict=True):
            shard.result = result
        return results[0]

    def check_place(self) -> None:
        """Refuses a place where shards cannot communicate.

        Raises:
          RuntimeError: In a branch, a loop or a function inside the
            computation.
        """
        graph = tf.compat.v1.get_default_graph()
        if graph is not self.graph or tensorflow_v1.in_control_flow(graph):
            raise RuntimeError(
                "Gradients are applied in tf.cond, tf.while_loop or a"
                " tf.function inside the computation of shard(), or shard() is"
                " called in control flow v1. Shards cannot communicate there."
                " Apply gradients outside of it; to skip an update, multiply"
                " the gradients by zero."
            )

    def initialize_first(
        self, variable: tf.Variable, original: tf.Variable
    ) -> None:
        """Gives a copy shard 0's value, in the first run that needs it."""
        with tf.control_dependencies(None), tf.name_scope("initialize/"):
            has_value, can_have_one = (
                tf.raw_ops.VarIsInitializedOp(resource=v.handle)
                for v in (variable, original)
            )
            ready = tf.cond(
                # There is no value yet while shard 0's own is initialized.
                tf.logical_or(has_value, tf.logical_not(can_have_one)),
                tf.no_op,
                lambda: variable.assign(original.read_value()).op,
            )
        tensorflow_v1.run_before(
            ready if isinstance(ready, tf.Operation) else ready.op,
            self.start[0],
        )

    @contextlib.contextmanager
    def collections_of(self, shard: traced_shard.Shard) -> Iterator[None]:
        """Puts a shard's own variables into the graph's collections."""
        outer = self._collections()
        self._set_collections(shard.collections)
        try:
            yield
        finally:
            shard.collections = self._collections()
            self._set_collections(outer)

    def _collections(self) -> dict[str, list[Any]]:
        return {
            name: list(self.graph.get_collection_ref(name))
            for name in self.graph.get_all_collection_keys()
            if isinstance(name, str) and name not in _SHARED_COLLECTIONS
        }

    def _set_collections(self, collections: dict[str, list[Any]]) -> None:
        for name in {*collections, *self._collections()}:
            self.graph.get_collection_ref(name)[:] = collections.get(name, [])


def _unequal(waiting: list[int]) -> ValueError:
    return ValueError(
        f"Shards {waiting} wait for the others' gradients, but the others apply"
        " gradients fewer times. Every shard must apply gradients the same"
        " number of times."
    )
