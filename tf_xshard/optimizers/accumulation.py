"""Gradients of several calls, added up for one update.

TowerOptimizer and AGNOptimizer keep one accumulator for each variable, on each
replica. Rows of an embedding stay rows where a sum needs no more.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.distribute import indexed_slices
from tf_xshard.distribute import replica_context
from tf_xshard.distribute import replica_variables


class SeenVariables:
    """Variables that have had a gradient, by their number.

    Whether a variable has a gradient is known when a call is traced, and an
    update of what several calls have accumulated handles those that were seen
    by then. A function that is traced later must not add to them, or the
    update would leave its gradients behind.

    Args:
      optimizer_name: For errors.
    """

    def __init__(self, optimizer_name: str) -> None:
        self._optimizer_name = optimizer_name
        self._seen: set[int] = set()
        self._dense: set[int] = set()
        self._updates: weakref.WeakSet = weakref.WeakSet()

    def __contains__(self, index: int) -> bool:
        return index in self._seen

    def __len__(self) -> int:
        return len(self._seen)

    def is_sparse(self, index: int) -> bool:
        """Whether all gradients of a variable were IndexedSlices."""
        return index not in self._dense

    def add(self, index: int, name: str, sparse: bool = False) -> None:
        """Notes a gradient.

        Args:
          index: The variable's number.
          name: Its name, for errors.
          sparse: Whether the gradient is IndexedSlices.

        Raises:
          ValueError: If an update that was traced before, in another function,
            does not handle it.
        """
        known = index in self._seen and (sparse or index in self._dense)
        if not known and self._has_other_updates():
            # Functions that nobody can call any more do not count.
            gc.collect()
            if self._has_other_updates():
                raise ValueError(
                    f"{self._optimizer_name}: {name!r} has"
                    f" {'IndexedSlices' if sparse else 'a dense gradient'} in"
                    " a tf.function that is traced after another one of this"
                    " optimizer, whose update does not handle it. Give that"
                    " gradient in both (zeros where there is none), or give"
                    " each function an optimizer of its own."
                )
        self._seen.add(index)
        if not sparse:
            self._dense.add(index)

    def _has_other_updates(self) -> bool:
        here = replica_context.outermost_graph()
        return any(graph is not here for graph in self._updates)

    def note_update(self) -> None:
        """Called where an update is made of what was seen."""
        graph = replica_context.outermost_graph()
        if graph is not None:
            self._updates.add(graph)


class GradientAccumulator:
    """The sums of gradients of several calls, on this replica.

    The variables that it makes belong to the optimizer, which gives them the
    attributes under which checkpoints know them.

    Args:
      variables: The trainable variables, in the optimizer's order.
      suffix: Ends the names of the sums.
      seen: What the optimizer's gradients are, between traces.
      has_sums: Whether there are sums. Without them only what was seen is kept.
      is_sparse: Whether touched rows are counted, so that sums of
        IndexedSlices can be taken as such.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        suffix: str,
        seen: SeenVariables,
        *,
        has_sums: bool = True,
        is_sparse: bool = False,
    ) -> None:
        self._trained = variables
        self._seen = seen
        self.sums = [
            replica_variables.accumulator_of(
                v, f"{replica_variables.flat_name(v)}_{suffix}"
            )
            for v in variables
            if has_sums
        ]
        # Rows of an embedding that a round has touched.
        self.touched = [
            replica_variables.make(
                v.shape[:1],
                "float32",
                f"{replica_variables.flat_name(v)}_touched",
            )
            for v in variables
            if is_sparse
        ]

    def add(self, gradients: Sequence, indices: Sequence[int]) -> None:
        """Adds the gradients of one call.

        Args:
          gradients: Tensors of the variables' shapes, IndexedSlices or None.
          indices: The numbers of their variables.

        Raises:
          ValueError: See `SeenVariables.add`.
        """
        for gradient, index in zip(gradients, indices, strict=True):
            if gradient is None:
                continue
            name = replica_variables.flat_name(self._trained[index])
            is_sparse = isinstance(gradient, tf.IndexedSlices)
            self._seen.add(index, name, is_sparse and bool(self.touched))
            if self.sums:
                replica_variables.add(self.sums[index], gradient)
            if is_sparse and self.touched:
                ones = tf.ones_like(gradient.indices, tf.float32)
                replica_variables.add(
                    self.touched[index],
                    tf.IndexedSlices(ones, gradient.indices),
                )

    def read(self, index: int) -> tf.Tensor:
        """A variable's sum, a tensor of its shape."""
        return replica_variables.read(self.sums[index])

    def pop(self, index: int) -> Any:
        """A variable's sum, which is zero afterwards.

        Args:
          index: The variable's number.

        Returns:
          A tensor, or IndexedSlices if all gradients were such.
        """
        total: Any = self.read(index)
        if self.touched and self._seen.is_sparse(index):
            touched = self.touched[index]
            rows = tf.reshape(
                tf.where(replica_variables.read(touched) > 0), [-1]
            )
            total = indexed_slices.UniqueSlices(
                tf.gather(total, rows),
                rows,
                tf.constant(list(self.sums[index].shape), tf.int64),
            )
            _set_to_zero(touched)
        _set_to_zero(self.sums[index])
        return total

    def reset(self) -> None:
        """Sets all sums to zero, on this replica."""
        for one in (*self.sums, *self.touched):
            _set_to_zero(one)


def _set_to_zero(variable: keras.Variable) -> None:
    replica_variables.assign(variable, tf.zeros(variable.shape, variable.dtype))
