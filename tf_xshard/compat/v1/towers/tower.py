"""`tf.contrib.estimator.TowerOptimizer`: one update from several towers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.compat.v1.optimizers import base as wrapper
from tf_xshard.compat.v1.optimizers import inner_optimizers
from tf_xshard.compat.v1.optimizers import losses_and_gradients
from tf_xshard.compat.v1.towers import build_state as towers_lib
from tf_xshard.distribute import indexed_slices
from tf_xshard.private.tensorflow import autograph


class TowerOptimizer(wrapper.Wrapper):
    """Gathers gradients from all towers and reduces them in the last one.

    For optimizers in a model_fn that `replicate_model_fn` replicates; with one
    tower, or outside of it, all calls go to the wrapped optimizer.

    `compute_gradients` divides the loss by the number of towers, unless losses
    are combined by SUM. `apply_gradients` collects gradients; in the last tower
    it applies the sum of all towers' gradients once. A `SyncReplicasOptimizer`
    must be inside, not around it.

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
        | Callable[[], Any],
    ) -> None:
        super().__init__(False, "TowerOptimizer")
        self._inner: inner_optimizers.V1 | inner_optimizers.Keras | None = None
        self._optimizer_fn: Callable[[], Any] | None = None
        if isinstance(
            optimizer_or_optimizer_fn,
            (tf.compat.v1.train.Optimizer, keras.optimizers.Optimizer),
        ) or not callable(optimizer_or_optimizer_fn):
            self._set_inner(optimizer_or_optimizer_fn)
        else:
            self._optimizer_fn = optimizer_or_optimizer_fn

    def _set_inner(
        self, optimizer: Any
    ) -> inner_optimizers.V1 | inner_optimizers.Keras:
        self._inner = inner_optimizers.of(optimizer)
        self._track(self._inner)
        return self._inner

    def _inner_here(self) -> inner_optimizers.V1 | inner_optimizers.Keras:
        """The wrapped optimizer's adapter; remembers that it was needed."""
        towers_lib.mark_used()
        if self._inner is not None:
            return self._inner
        assert self._optimizer_fn is not None, "neither optimizer nor function"
        return self._set_inner(
            autograph.as_called_by_user(self._optimizer_fn)()
        )

    @staticmethod
    def has_been_used() -> bool:
        """Whether a TowerOptimizer was used in the current graph.

        Since its last towers were built, if there were any.

        Returns:
          A bool.
        """
        return towers_lib.is_used()

    @autograph.entry_point
    def compute_gradients(
        self, loss: Any, *args: Any, **kwargs: Any
    ) -> list[tuple[Any, Any]]:
        """Scales the loss if needed, and computes this tower's gradients.

        Args:
          loss: A scalar tensor, or in a `tf.function` and eagerly a function
            without arguments that returns one.
          *args: Further arguments of the wrapped optimizer's
            `compute_gradients`.
          **kwargs: The same by name.

        Returns:
          A list of (gradient, variable) pairs of this tower; a gradient has its
          variable's shape.

        Raises:
          TypeError, ValueError: If the loss is not a floating point tensor.
          ValueError, RuntimeError: As the wrapped optimizer's.

        Example: see the class.
        """
        inner = self._inner_here()
        towers = towers_lib.current()
        if towers is not None and towers.averages:
            loss = averaged_loss(loss, towers.num_towers)
        return inner_optimizers.compute_gradients(
            inner, super().compute_gradients, loss, *args, **kwargs
        )

    @autograph.entry_point
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: tf.Variable | None = None,
        **kwargs: Any,
    ) -> tf.Operation | None:
        """Collects gradients; in the last tower, applies those of all towers.

        Args:
          grads_and_vars: (gradient, variable) pairs of equal shapes; any
            iterable. Where a variable has a dense gradient in one tower and
            IndexedSlices in another, the slices are made dense.
          global_step: A scalar variable that is incremented by one after the
            update; the last tower's is used. Default: none.
          **kwargs: Further arguments of the wrapped optimizer's
            `apply_gradients`; the last tower's are used.

        Returns:
          In the last tower, the operation that applies the gradients; in the
          others, one that waits for this tower's gradients. None in eager mode.

        Raises:
          ValueError: If grads_and_vars is empty, malformed or, over all towers,
            has no gradient, or towers applied gradients a different number of
            times.
          TypeError: If a gradient can't be converted to a tensor.
          RuntimeError: In a branch, a loop or a function inside the model_fn,
            where towers' gradients cannot be added up.

        Example: see the class.
        """
        inner = self._inner_here()
        pairs = losses_and_gradients.pairs_of(grads_and_vars)
        towers = towers_lib.current()
        if towers is None or towers.num_towers == 1:
            return inner.apply(pairs, global_step, **kwargs)
        if towers.graph is not tf.compat.v1.get_default_graph():
            raise RuntimeError(
                "Gradients are applied in tf.cond, tf.while_loop or a"
                " tf.function inside the model_fn, where the towers' gradients"
                " cannot be added up. Apply them outside of it."
            )
        pairs = losses_and_gradients.tensors_of(pairs)
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
    """A tower's share of the mean of all towers' losses."""
    return losses_and_gradients.map_loss(
        lambda x: tf.divide(x, float(num_towers), name="averaged_loss"), loss
    )


def _summed(of_towers: list[towers_lib.Pairs]) -> towers_lib.Pairs:
    """The towers' gradients added up, variables in first-seen order."""
    by_variable: dict[int, tuple[Any, list[indexed_slices.Gradient]]] = {}
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
