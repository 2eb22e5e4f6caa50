"""Which variables have had gradients, when an update is traced."""

from __future__ import annotations

import gc
import weakref

from tf_xshard.distribute import replica_context


class SeenVariables:
    """Variables that have had a gradient, by their number.

    Whether a variable has a gradient is known when a call is traced, and an
    update of what several calls have accumulated handles those that were seen
    by then. A function that is traced later must not add to them, or the
    update would leave its gradients behind.

    Args:
      optimizer_name: For errors.
    """

    def __init__(self, optimizer_name: str):
        self._optimizer_name = optimizer_name
        self._seen = set()
        self._dense = set()
        self._updates = weakref.WeakSet()

    def __contains__(self, index: int) -> bool:
        return index in self._seen

    def __len__(self) -> int:
        return len(self._seen)

    def is_sparse(self, index: int) -> bool:
        """Whether all gradients of a variable were IndexedSlices."""
        return index not in self._dense

    def add(self, index: int, name: str, sparse: bool = False) -> None:
        """Notes a gradient.

        Raises:
          ValueError: If an update that was traced before, in another function,
            does not handle it.
        """
        known = index in self._seen and (sparse or index in self._dense)
        if not known and self._others():
            # Functions that nobody can call any more do not count.
            gc.collect()
            if self._others():
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

    def _others(self) -> bool:
        here = replica_context.outermost_graph()
        return any(graph is not here for graph in self._updates)

    def used(self) -> None:
        """Called where an update is made of what was seen."""
        graph = replica_context.outermost_graph()
        if graph is not None:
            self._updates.add(graph)
