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
import numpy as np
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

    def state(self) -> tuple[frozenset[int], frozenset[int]]:
        """Returns the indices that were seen, and those of dense gradients."""
        return frozenset(self._seen), frozenset(self._dense)

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

    def add_restored(self, index: int, sparse: bool) -> None:
        """Records that a variable has a sum from a file."""
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

    def note(self, gradients: Sequence, indices: Sequence[int]) -> None:
        """Records which variables have a gradient in the traced call."""
        for gradient, index in zip(gradients, indices, strict=True):
            if gradient is not None:
                self._seen.add(
                    index,
                    replica_variables.flat_name(self._trained[index]),
                    isinstance(gradient, tf.IndexedSlices)
                    and bool(self.touched),
                )

    def add(self, gradients: Sequence, indices: Sequence[int]) -> None:
        """Adds the gradients of one call."""
        self.note(gradients, indices)
        for gradient, index in zip(gradients, indices, strict=True):
            if gradient is None:
                continue
            if self.sums:
                replica_variables.add(self.sums[index], gradient)
            if isinstance(gradient, tf.IndexedSlices) and self.touched:
                ones = tf.ones_like(gradient.indices, tf.float32)
                replica_variables.add(
                    self.touched[index],
                    tf.IndexedSlices(ones, gradient.indices),
                )

    def read(self, index: int) -> tf.Tensor:
        """Returns a variable's sum, as a tensor of the variable's shape."""
        return replica_variables.read(self.sums[index])

    def note_restored(self) -> None:
        """Records which variables have a sum from a file."""
        for index, one in enumerate(self.sums):
            if index in self._seen:
                continue
            rows = _rows_with_numbers(one)
            touched = np.zeros_like(rows)
            if self.touched:
                touched = _rows_with_numbers(self.touched[index])
            if rows.any():
                self._seen.add_restored(index, not (rows & ~touched).any())

    def totals(
        self, gradients: Sequence, indices: Sequence[int]
    ) -> tuple[list, list]:
        """Returns all sums with the gradients of the last call, and variables.

        Changes nothing.
        """
        # The last call's variables (`indices`) are returned even if they are
        # frozen or have no gradient (None). Other variables are returned only
        # if they are trainable and have a gradient.
        last = dict(zip(indices, gradients, strict=True))
        totals, variables = [], []
        for index, variable in enumerate(self._trained):
            is_trainable = getattr(variable, "trainable", True)
            if index in last or (index in self._seen and is_trainable):
                totals.append(
                    self._total(index, last.get(index))
                    if index in self._seen
                    else None
                )
                variables.append(variable)
        return totals, variables

    def _total(self, index: int, gradient: Any) -> Any:
        """Returns the sum of a variable with a further gradient, or None."""
        total = self.read(index)
        if self.touched and self._seen.is_sparse(index):
            return self._total_rows(index, total, gradient)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.tensor_scatter_nd_add(
                total,
                gradient.indices[:, tf.newaxis],
                tf.cast(gradient.values, total.dtype),
            )
        if gradient is None:
            return total
        return total + tf.cast(gradient, total.dtype)

    def _total_rows(
        self, index: int, total: tf.Tensor, gradient: tf.IndexedSlices | None
    ) -> tf.IndexedSlices:
        """Returns the rows that have had a gradient in this round."""
        touched = replica_variables.read(self.touched[index]) > 0
        if gradient is not None:
            touched = tf.tensor_scatter_nd_update(
                touched,
                gradient.indices[:, tf.newaxis],
                tf.ones_like(gradient.indices, tf.bool),
            )
        rows = tf.reshape(tf.where(touched), [-1])
        values = tf.gather(total, rows)
        if gradient is not None:
            positions = tf.searchsorted(
                rows, tf.cast(gradient.indices, tf.int64)
            )
            values = tf.tensor_scatter_nd_add(
                values,
                positions[:, tf.newaxis],
                tf.cast(gradient.values, values.dtype),
            )
        return indexed_slices.UniqueSlices(
            values, rows, tf.constant(list(total.shape), tf.int64)
        )

    def reset(self) -> None:
        """Sets all sums to zero, on this replica."""
        for index, one in enumerate(self.sums):
            if index in self._seen:
                _set_to_zero(one)
                if self.touched and self._seen.is_sparse(index):
                    _set_to_zero(self.touched[index])


def _rows_with_numbers(variable: keras.Variable) -> np.ndarray:
    """Returns which rows are not zero, on any replica of this process."""
    return np.any(
        [
            np.reshape(one, [(*one.shape, 1)[0], -1])
            for one in map(np.asarray, replica_variables.copies(variable))
        ],
        axis=(0, 2),
    )


def _set_to_zero(variable: keras.Variable) -> None:
    replica_variables.assign(variable, tf.zeros(variable.shape, variable.dtype))
