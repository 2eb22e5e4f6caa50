"""`tf.contrib.estimator.TowerOptimizer`: one update from several towers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.compat.v1 import inner_optimizers
from tf_xshard.compat.v1 import wrapper
from tf_xshard.distribute import indexed_slices
from tf_xshard.private import tensorflow as private_tensorflow

Reduction = tf.compat.v1.losses.Reduction

# The towers that are being built, by graph.
_states = weakref.WeakKeyDictionary()
# The graphs in which a TowerOptimizer was used since the last towers.
_used_in = weakref.WeakSet()


class Towers:
    """The towers of one graph while `replicate_model_fn` builds them.

    Args:
      num_towers: Their number.
      loss_reduction: How their losses are combined.
    """

    def __init__(self, num_towers: int, loss_reduction: str):
        self.num_towers = num_towers
        self.loss_reduction = loss_reduction
        self.index = 0
        self.graph = tf.compat.v1.get_default_graph()
        self.variable_scope = tf.compat.v1.get_variable_scope()
        self.name_scope = self.graph.get_name_scope()
        # For each tower the gradients of each apply, of all its optimizers.
        self.collected = [[] for _ in range(num_towers)]

    @property
    def averages(self) -> bool:
        """Whether the losses of several towers are averaged."""
        return self.num_towers > 1 and self.loss_reduction != Reduction.SUM

    @property
    def is_last(self) -> bool:
        """Whether the last tower is being built."""
        return self.index == self.num_towers - 1

    def check_equal_counts(self) -> None:
        """Refuses towers of which one has applied gradients less often.

        Raises:
          ValueError: If there is one.
        """
        counts = [len(applied) for applied in self.collected]
        if len(set(counts)) > 1:
            raise ValueError(
                f"The towers called apply_gradients() {counts} times. Every"
                " tower was supposed to make the same optimizer calls."
            )


@contextlib.contextmanager
def building(num_towers: int, loss_reduction: str) -> Iterator[Towers]:
    """Makes TowerOptimizers of the current graph collect gradients.

    Args:
      num_towers: The number of towers.
      loss_reduction: How their losses are combined.

    Yields:
      The `Towers`.
    """
    graph = tf.compat.v1.get_default_graph()
    if graph in _states:
        raise RuntimeError(
            "A replicated model_fn is called inside another one."
        )
    _states[graph] = towers = Towers(num_towers, loss_reduction)
    _used_in.discard(graph)
    try:
        yield towers
    finally:
        del _states[graph]
        _used_in.discard(graph)


def _current() -> Towers | None:
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if graph in _states:
            return _states[graph]
        graph = getattr(graph, "outer_graph", None)
    return None


class TowerOptimizer(wrapper.Wrapper):
    """Gathers gradients from all towers and reduces them in the last one.

    For optimizers in a model_fn that `replicate_model_fn` replicates; with one
    tower, or outside of it, everything goes to the wrapped optimizer.

    `compute_gradients` divides the loss by the number of towers, unless losses
    are combined by SUM. `apply_gradients` collects; in the last tower the sum
    of all towers' gradients is applied once. `SyncReplicasOptimizer` belongs
    inside.

    Args:
      optimizer_or_optimizer_fn: A v1 optimizer (in a `tf.function` and eagerly
        a Keras one, too), or a function without arguments that returns one,
        which is called once, when the optimizer is first needed.

    Raises:
      TypeError: If it is neither.

    Example:

    >>> def model_fn(features, labels, mode):
    ...     w = tf.compat.v1.get_variable("w", [], initializer=
    ...         tf.compat.v1.zeros_initializer())
    ...     loss = tf.reduce_mean(labels - w * features)
    ...     optimizer = tf_xshard.compat.v1.TowerOptimizer(
    ...         tf.compat.v1.train.GradientDescentOptimizer(1.0))
    ...     return tf_xshard.compat.v1.EstimatorSpec(
    ...         mode, loss=loss, train_op=optimizer.minimize(loss))
    >>> replicated = tf_xshard.compat.v1.replicate_model_fn(
    ...     model_fn, devices=["/CPU:0", "/CPU:0"])
    >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    ...     x = tf.constant([1.0, 2.0, 3.0, 6.0])
    ...     spec = replicated(x, x, "train")
    ...     session.run(tf.compat.v1.global_variables_initializer())
    ...     session.run(spec.train_op)
    ...     float(session.run(tf.compat.v1.trainable_variables()[0]))
    3.0

    Source: tf.contrib.estimator.TowerOptimizer (TensorFlow 1.14).
    """

    COLLECTION_FOR_GRAPH_STATES = "replicate_model_fn_graph_states"

    def __init__(
        self,
        optimizer_or_optimizer_fn: tf.compat.v1.train.Optimizer
        | keras.optimizers.Optimizer
        | Callable,
    ):
        super().__init__(False, "TowerOptimizer")
        self._inner = self._optimizer_fn = None
        if isinstance(
            optimizer_or_optimizer_fn,
            (tf.compat.v1.train.Optimizer, keras.optimizers.Optimizer),
        ) or not callable(optimizer_or_optimizer_fn):
            self._set_inner(optimizer_or_optimizer_fn)
        else:
            self._optimizer_fn = optimizer_or_optimizer_fn

    def _set_inner(self, optimizer):
        self._inner = inner_optimizers.of(optimizer)
        self._track(self._inner)

    def _inner_here(self):
        """The wrapped optimizer's adapter; remembers that it was needed."""
        _used_in.add(tf.compat.v1.get_default_graph())
        if self._inner is None:
            self._set_inner(
                private_tensorflow.as_called_by_user(self._optimizer_fn)()
            )
        return self._inner

    @staticmethod
    def has_been_used() -> bool:
        """Whether a TowerOptimizer was used in the current graph.

        Since its last towers were built, if there were any.

        Returns:
          A bool.
        """
        return tf.compat.v1.get_default_graph() in _used_in

    @private_tensorflow.entry_point
    def compute_gradients(self, loss, *args, **kwargs) -> list:
        """Computes gradients, but first, if needed, scales the loss.

        Args:
          loss: A tensor, or in a `tf.function` and eagerly a function without
            arguments that returns one.
          *args: Further arguments of the wrapped optimizer's
            `compute_gradients`.
          **kwargs: The same by name.

        Returns:
          A list of (gradient, variable) pairs of this tower.

        Raises:
          TypeError: If the loss is no floating point tensor.
          ValueError, RuntimeError: As the wrapped optimizer's.

        Example: see the class.
        """
        inner = self._inner_here()
        towers = _current()
        if towers is not None and towers.averages:
            loss = averaged_loss(loss, towers.num_towers)
        return inner_optimizers.compute_gradients(
            inner, super().compute_gradients, loss, *args, **kwargs
        )

    @private_tensorflow.entry_point
    def apply_gradients(self, grads_and_vars, global_step=None, **kwargs):
        """Collects gradients, to apply them with the last tower.

        Args:
          grads_and_vars: (gradient, variable) pairs; anything that can be
            iterated over once. Where towers give a variable dense gradients and
            IndexedSlices, these are made dense.
          global_step: A variable that is incremented by one after the update;
            the last tower's counts. Default: none.
          **kwargs: Further arguments of the wrapped optimizer's
            `apply_gradients`; the last tower's count.

        Returns:
          The operation that applies the gradients; in all towers but the last
          one that waits for this tower's gradients. None in eager mode.

        Raises:
          ValueError: If grads_and_vars is empty, malformed or, over all towers,
            has no gradient, or towers applied a different number of times.
          TypeError: If a gradient can't be a tensor.
          RuntimeError: If it is called in a branch, a loop or a function inside
            the model_fn, where towers' gradients can't meet.

        Example: see the class.
        """
        inner = self._inner_here()
        pairs = inner_optimizers.pairs_of(grads_and_vars)
        towers = _current()
        if towers is None or towers.num_towers == 1:
            return inner.apply(pairs, global_step, **kwargs)
        if towers.graph is not tf.compat.v1.get_default_graph():
            raise RuntimeError(
                "Gradients are applied in tf.cond, tf.while_loop or a"
                " tf.function inside the model_fn, where towers' gradients"
                " can't meet. Apply them outside of it."
            )
        pairs = inner_optimizers.tensors_of(pairs)
        collected = towers.collected
        collected[towers.index].append(pairs)
        if not towers.is_last:
            present = [
                g.values if isinstance(g, tf.IndexedSlices) else g
                for g, _ in pairs
                if g is not None
            ]
            with tf.control_dependencies(present):
                return tf.no_op("train_op_placeholder")
        position = len(collected[-1]) - 1
        if any(len(applied) <= position for applied in collected):
            towers.check_equal_counts()
        with (
            tf.compat.v1.variable_scope(
                towers.variable_scope, auxiliary_name_scope=False
            ),
            tf.name_scope(f"{towers.name_scope}/".lstrip("/") or ""),
        ):
            with tf.name_scope("gradient_aggregating"):
                summed = _summed([a[position] for a in collected])
            return inner.apply(summed, global_step, **kwargs)

    def get_name(self) -> str:
        """Returns the wrapped optimizer's name.

        Returns:
          A str.
        """
        return self._inner_here().get_name()


def averaged_loss(loss: Any, num_towers: int) -> Any:
    """A tower's share of the mean of all towers' losses; see `map_loss`."""
    return inner_optimizers.map_loss(
        lambda x: tf.divide(x, float(num_towers), name="averaged_loss"), loss
    )


def _summed(of_towers: list[list[tuple]]) -> list[tuple]:
    """The towers' gradients added up, variables in first-seen order."""
    by_variable = {}
    for pairs in of_towers:
        for gradient, variable in pairs:
            _, gradients = by_variable.setdefault(id(variable), (variable, []))
            gradients.append(gradient)
    result = []
    for variable, gradients in by_variable.values():
        with tf.device(getattr(variable, "device", None) or None):
            total = indexed_slices.added(gradients, variable)
        result.append((total, variable))
    return result
