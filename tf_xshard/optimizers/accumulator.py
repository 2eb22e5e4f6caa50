"""Sums gradients over several calls, for TowerOptimizer and AGNOptimizer.

Each replica has one accumulator per variable. Where possible, sums of
IndexedSlices stay IndexedSlices.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.distribute import indexed_slices
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib


class SeenVariables:
    """Records the indices of variables that have had a gradient."""

    # Tracing a call shows which variables have a gradient. An update handles
    # only the variables seen by the time it is traced. A function traced later
    # must not add variables, since that update would never apply their
    # gradients.

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
        """Returns whether all gradients of a variable were IndexedSlices."""
        return index not in self._dense

    def add(self, index: int, name: str, sparse: bool = False) -> None:
        """Records that a variable has a gradient."""
        known = index in self._seen and (sparse or index in self._dense)
        if not known and self._has_other_updates():
            # Collect functions that can't be called anymore; they don't count.
            gc.collect()
            if self._has_other_updates():
                raise ValueError(
                    f"{self._optimizer_name}: {name!r} has"
                    f" {'IndexedSlices' if sparse else 'a dense gradient'} in"
                    " a tf.function that is traced after another function of"
                    " this optimizer. The update in the earlier function does"
                    " not handle this gradient. Pass the gradient in both"
                    " functions (zeros where there is none), or use a separate"
                    " optimizer for each function."
                )
        self._seen.add(index)
        if not sparse:
            self._dense.add(index)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Opens a context whose traces are forgotten afterwards."""
        before = set(self._seen), set(self._dense), self._updates
        self._updates = weakref.WeakSet()
        try:
            yield
        finally:
            self._seen, self._dense, self._updates = before

    def _has_other_updates(self) -> bool:
        site = site_lib.outermost_graph()
        return any(graph is not site for graph in self._updates)

    def note_update(self) -> None:
        """Records that an update of the seen variables is being traced."""
        graph = site_lib.outermost_graph()
        if graph is not None:
            self._updates.add(graph)


class GradientAccumulator:
    """Holds this replica's sums of gradients over several calls."""

    # The optimizer owns the variables, and assigns them to attributes whose
    # names checkpoints store.

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        suffix: str,
        seen: SeenVariables,
        *,
        has_sums: bool = True,
        counts_rows: bool = False,
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
        # Nonzero for embedding rows that have had a gradient in this round.
        self.touched = [
            replica_variables.make(
                v.shape[:1],
                "float32",
                f"{replica_variables.flat_name(v)}_touched",
            )
            for v in variables
            if counts_rows
        ]

    def add(self, gradients: Sequence, indices: Sequence[int]) -> None:
        """Adds the gradients of one call."""
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
        """Returns a variable's sum, as a tensor of the variable's shape."""
        return replica_variables.read(self.sums[index])

    def pop_all(self, indices: Sequence[int]) -> tuple[list, list]:
        """Returns all sums and their variables, and resets the sums to zero."""
        # The last call's variables (`indices`) are returned even if they are
        # frozen or have no gradient (None). Other variables are returned only
        # if they are trainable and have a gradient.
        totals, variables = [], []
        for index, variable in enumerate(self._trained):
            is_frozen = not getattr(variable, "trainable", True)
            if index in self._seen:
                total = self._pop(index)
            elif index in indices:
                total = None
            else:
                continue
            if index in indices or not is_frozen:
                totals.append(total)
                variables.append(variable)
        return totals, variables

    def _pop(self, index: int) -> Any:
        """Returns a variable's sum and resets it to zero."""
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
