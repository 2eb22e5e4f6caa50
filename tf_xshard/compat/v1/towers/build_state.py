"""Keeps the state of a graph's towers while they are built."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

Reduction = tf.compat.v1.losses.Reduction

# (gradient, variable) pairs of equal shapes.
Pairs = list[tuple[Any, Any]]

# For each graph, the towers that are being built.
_states: weakref.WeakKeyDictionary[tf.Graph, Towers] = (
    weakref.WeakKeyDictionary()
)
# Graphs in which a TowerOptimizer was used since the last towers were built.
_used_in: weakref.WeakSet[tf.Graph] = weakref.WeakSet()


class Towers:
    """Holds the towers of one graph while `replicate_model_fn` builds them."""

    def __init__(self, num_towers: int, loss_reduction: str) -> None:
        self.num_towers = num_towers
        self.loss_reduction = loss_reduction
        # The tower that is being built.
        self.index = 0
        self.graph = tf.compat.v1.get_default_graph()
        # The scopes around the towers.
        self.variable_scope = tf.compat.v1.get_variable_scope()
        self.name_scope = self.graph.get_name_scope()
        # For each tower, the pairs of each call of `apply_gradients`, by any of
        # the tower's optimizers.
        self.collected: list[list[Pairs]] = [[] for _ in range(num_towers)]

    @property
    def averages(self) -> bool:
        """True if the losses of several towers are averaged."""
        return self.num_towers > 1 and self.loss_reduction != Reduction.SUM

    @property
    def is_last(self) -> bool:
        """True while the last tower is built."""
        return self.index == self.num_towers - 1

    def check_equal_counts(self) -> None:
        """Raises ValueError if towers called `apply_gradients` unequally."""
        counts = [len(applied) for applied in self.collected]
        if len(set(counts)) > 1:
            raise ValueError(
                f"The towers called apply_gradients() {counts} times. Every"
                " tower must make the same optimizer calls."
            )


@contextlib.contextmanager
def building(num_towers: int, loss_reduction: str) -> Iterator[Towers]:
    """Makes TowerOptimizers of the current graph collect gradients."""
    graph = tf.compat.v1.get_default_graph()
    if graph in _states:
        raise RuntimeError(
            "A replicated model_fn is called inside another one. Call"
            " replicate_model_fn once, on the outermost."
        )
    _states[graph] = towers = Towers(num_towers, loss_reduction)
    _used_in.discard(graph)
    try:
        yield towers
    finally:
        del _states[graph]
        _used_in.discard(graph)


def current() -> Towers | None:
    """Returns the towers that are built in this graph or an outer graph."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if graph in _states:
            return _states[graph]
        graph = getattr(graph, "outer_graph", None)
    return None


def mark_used() -> None:
    """Records that a TowerOptimizer was used in the current graph."""
    _used_in.add(tf.compat.v1.get_default_graph())


def is_used() -> bool:
    """Returns True if a TowerOptimizer was used since the last towers."""
    return tf.compat.v1.get_default_graph() in _used_in
