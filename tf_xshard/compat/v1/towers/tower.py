"""Defines TF1's `TowerOptimizer`, which updates once for several towers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.compat.v1.optimizers import base as wrapper
from tf_xshard.compat.v1.optimizers import inner_optimizers
from tf_xshard.compat.v1.towers import build_state as towers_lib
from tf_xshard.distribute import indexed_slices
from tf_xshard.private.tensorflow import autograph


class TowerOptimizer(wrapper.Wrapper):
    """Sums the gradients of all towers, and applies them in the last tower.

    Wrap the optimizers of a model_fn that `replicate_model_fn` replicates. With
    one tower, or outside such a model_fn, calls go to the wrapped optimizer.

    `compute_gradients` divides the loss by the number of towers, unless losses
    are combined by SUM. `apply_gradients` collects gradients. In the last
    tower, it applies the sum of all towers' gradients once. Put a
    `SyncReplicasOptimizer` inside a TowerOptimizer, not around it.

    Args:
      optimizer_or_optimizer_fn: A v1 optimizer, or a function without arguments
        that returns an optimizer. In a `tf.function` or in eager mode, it can
        be a Keras optimizer. The function is called once, at the optimizer's
        first use.

    Raises:
      TypeError: If the argument is neither an optimizer nor a function.

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
        """Returns the wrapped optimizer's adapter, and records its use."""
        towers_lib.mark_used()
        if self._inner is not None:
            return self._inner
        assert self._optimizer_fn is not None, "neither optimizer nor function"
        return self._set_inner(
            autograph.as_called_by_user(self._optimizer_fn)()
        )

    @staticmethod
    def has_been_used() -> bool:
        """Returns True if the current graph has used a TowerOptimizer.

        A use before the graph's last towers were built does not count.
        """
        return towers_lib.is_used()

    @autograph.entry_point
    def compute_gradients(
        self, loss: Any, *args: Any, **kwargs: Any
    ) -> list[tuple[Any, Any]]:
        """Scales the loss if needed, and computes this tower's gradients.

        Args:
          loss: A scalar tensor or, in a `tf.function` and eagerly, a function
            without arguments that returns a scalar tensor.
          *args: Passed to the wrapped optimizer's `compute_gradients`.
          **kwargs: Passed to the wrapped optimizer's `compute_gradients`.

        Returns:
          A list of this tower's (gradient, variable) pairs of equal shapes.

        Raises:
          TypeError, ValueError: If the loss is not a floating-point tensor.
          ValueError, RuntimeError: If the wrapped optimizer raises them.

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
        """Collects gradients; in the last tower, applies all towers' gradients.

        Args:
          grads_and_vars: An iterable of (gradient, variable) pairs of equal
            shapes. If a variable has a dense gradient in one tower and
            IndexedSlices in another tower, the slices are made dense.
          global_step: A scalar variable to increment by one after the update;
            the last tower's argument is used. Default: None.
          **kwargs: Further arguments of the wrapped optimizer's
            `apply_gradients`; the last tower's arguments are used.

        Returns:
          In the last tower, the operation that applies the gradients. In other
          towers, an operation that waits for the tower's gradients. None in
          eager mode.

        Raises:
          ValueError: If grads_and_vars is empty or malformed, if no tower has a
            gradient, or if towers applied gradients a different number of
            times.
          TypeError: If a gradient can't be converted to a tensor.
          RuntimeError: In a branch, a loop or a function inside the model_fn,
            where towers' gradients can't be added up.

        Example: see the class.
        """
        self._inner_here()
        pairs = wrapper.pairs_of(grads_and_vars)
        towers = towers_lib.current()
        if towers is None or towers.num_towers == 1:
            pairs = wrapper.tensors_of(pairs)
            gradients = [g for g, _ in pairs]
            return self._apply_inner(gradients, pairs, global_step, **kwargs)
        if towers.graph is not tf.compat.v1.get_default_graph():
            raise RuntimeError(
                "Gradients are applied in tf.cond, tf.while_loop or a"
                " tf.function inside the model_fn, where the towers' gradients"
                " can't be summed. Apply gradients at the top level of the"
                " model_fn."
            )
        pairs = wrapper.tensors_of(pairs)
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
            sums = [total for total, _ in summed]
            return self._apply_inner(sums, summed, global_step, **kwargs)

    def get_name(self) -> str:
        """Returns the wrapped optimizer's name, a str."""
        return self._inner_here().get_name()


def averaged_loss(loss: Any, num_towers: int) -> Any:
    """Returns a tower's share of the mean of all towers' losses."""
    return wrapper.map_loss(
        lambda x: tf.divide(x, float(num_towers), name="averaged_loss"), loss
    )


def _summed(of_towers: list[towers_lib.Pairs]) -> towers_lib.Pairs:
    """Adds up the towers' gradients, with variables in first-seen order."""
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
