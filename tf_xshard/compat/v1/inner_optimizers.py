"""The optimizer that a TF1 wrapper holds: v1's own, or one of Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.optimizers import inner_update
from tf_xshard.private import keras_optimizers
from tf_xshard.private import tensorflow as private_tensorflow
from tf_xshard.private import tensorflow_v1

Optimizer = tf.compat.v1.train.Optimizer


class V1:
    """A v1 optimizer.

    Args:
      optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer

    def leave_out_the_sum(self) -> None:
        """Makes the optimizer apply each replica's gradients as they are."""
        tensorflow_v1.take_out_the_sum(self.optimizer)

    def anew(self) -> V1:
        """The same optimizer without state, for another shard."""
        result = V1(tensorflow_v1.stateless_copy(self.optimizer))
        result.leave_out_the_sum()
        return result

    def apply(self, grads_and_vars, global_step, **kwargs):
        """Applies gradients; returns what the optimizer returns."""
        return self.optimizer.apply_gradients(
            grads_and_vars, global_step=global_step, **kwargs
        )

    def get_name(self) -> str:
        """The optimizer's name."""
        return self.optimizer.get_name()

    def get_slot(self, *args, **kwargs):
        """The optimizer's slot, or None."""
        return self.optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args, **kwargs) -> list[str]:
        """The names of the optimizer's slots."""
        return self.optimizer.get_slot_names(*args, **kwargs)

    def variables(self) -> list:
        """Slots, and what exists once."""
        return self.optimizer.variables()

    def restore_slot(self, **kwargs) -> None:
        """Takes a slot's value from a tf.train.Checkpoint."""
        tensorflow_v1.restore_slot(self.optimizer, **kwargs)


class Keras:
    """A Keras optimizer, behind the v1 methods.

    Args:
      optimizer: The optimizer.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self.optimizer = optimizer

    def leave_out_the_sum(self) -> None:
        """Makes the optimizer apply each replica's gradients as they are."""
        inner_update.make_local(self.optimizer)

    def anew(self) -> Keras:
        """The same optimizer without state, for another shard."""
        with tf.init_scope():
            result = Keras(
                type(self.optimizer).from_config(self.optimizer.get_config())
            )
        result.leave_out_the_sum()
        return result

    def get_name(self) -> str:
        """The optimizer's name."""
        return self.optimizer.name

    def apply(self, grads_and_vars, global_step, name=None):
        """Applies gradients; returns an operation, None in eager mode."""
        self.check_graph()
        if not any(g is not None for g, _ in grads_and_vars):
            names = [v.name for _, v in grads_and_vars]
            raise ValueError(f"No gradients provided for any variable: {names}")
        variables = [v for _, v in grads_and_vars]
        if not self.optimizer.built:
            with tf.init_scope():
                self.optimizer.build(variables)
        inner_update.apply(
            self.optimizer, [g for g, _ in grads_and_vars], variables
        )
        # Operations of a tf.function run in the order in which they are made.
        if global_step is not None:
            global_step.assign_add(tf.ones([], global_step.dtype))
        return None if tf.executing_eagerly() else tf.no_op(name)

    def check_graph(self) -> None:
        """Refuses a graph that is run by a Session.

        Raises:
          TypeError: If it is one.
        """
        if not tf.executing_eagerly() and not isinstance(
            tf.compat.v1.get_default_graph(), tf.__internal__.FuncGraph
        ):
            raise TypeError(
                "A Keras optimizer can't be used in a tf.Graph with a Session:"
                " its apply() returns no operation that a Session could run."
                " Use an optimizer of tf.compat.v1.train there, or the Keras"
                " optimizer eagerly or in a tf.function."
            )

    def get_slot(self, var, name):
        """The optimizer's variable `name` for `var`, or None."""
        return dict(self._slots(var)).get(name)

    def get_slot_names(self) -> list[str]:
        """The names of the variables that the optimizer has for each other."""
        names = []
        for var in keras_optimizers.trainable_variables(self.optimizer):
            names += [name for name, _ in self._slots(var)]
        return sorted(set(names))

    def _slots(self, var):
        # Keras names them "<variable's path with _ for />_<name>".
        path = getattr(var, "path", None) or var.name
        prefix = path.replace("/", "_").replace(":", "_") + "_"
        position = keras_optimizers.index_of(self.optimizer, var)
        if position is None:
            return
        count = len(keras_optimizers.trainable_variables(self.optimizer))
        for value in vars(self.optimizer).values():
            if not isinstance(value, (list, tuple)) or len(value) != count:
                continue
            slot = value[position]
            name = getattr(slot, "name", None) or ""
            if slot is not var and name.startswith(prefix):
                yield name.removeprefix(prefix), slot

    def variables(self) -> list:
        """All of the optimizer's variables."""
        return list(self.optimizer.variables)

    def restore_slot(self, **kwargs) -> None:
        """Nothing: Keras optimizers restore their own variables."""


def of(opt) -> V1 | Keras:
    """An adapter for a user's optimizer.

    Args:
      opt: A v1 or a Keras optimizer.

    Returns:
      A `V1` or a `Keras`.

    Raises:
      TypeError: If it is neither.
    """
    if isinstance(opt, Optimizer):
        return V1(opt)
    if isinstance(opt, keras.optimizers.Optimizer):
        result = Keras(opt)
        result.check_graph()
        return result
    raise TypeError(
        "The wrapped optimizer must be one of tf.compat.v1.train.Optimizer or"
        f" of keras.optimizers.Optimizer, got {type(opt).__name__}."
    )


def map_loss(function: Callable, loss: Any) -> Any:
    """Applies a function to a loss, now or when the loss is computed.

    Args:
      function: From a scalar tensor to another.
      loss: A tensor, or a function without arguments that returns one.

    Returns:
      A tensor or a function.

    Raises:
      TypeError: If the loss is neither.
    """
    if callable(loss) and not tf.is_tensor(loss):
        computed = private_tensorflow.as_called_by_user(loss)
        return lambda: function(computed())
    if loss is None or isinstance(loss, (list, tuple)):
        raise TypeError(f"loss must be a tensor or a function, got {loss!r}.")
    return function(loss)


def compute_gradients(inner, compute, loss, var_list=None, **kwargs) -> list:
    """Gradients by the optimizer itself, or for a Keras one by v1's own way.

    Args:
      inner: A `V1` or a `Keras`.
      compute: `tf.compat.v1.train.Optimizer.compute_gradients`, bound.
      loss: A tensor or a function.
      var_list: The variables, or None.
      **kwargs: Further arguments.

    Returns:
      (gradient, variable) pairs.
    """
    if callable(loss) and not tf.is_tensor(loss):
        loss = private_tensorflow.as_called_by_user(loss)
    if isinstance(inner, V1):
        return inner.optimizer.compute_gradients(
            loss, var_list=var_list, **kwargs
        )
    if var_list is None:
        return compute(loss, **kwargs)
    # Keras variables hold TensorFlow's.
    var_list = tf.nest.flatten(var_list)
    inside = [v.value if isinstance(v, keras.Variable) else v for v in var_list]
    pairs = compute(loss, var_list=inside, **kwargs)
    return [(g, v) for (g, _), v in zip(pairs, var_list, strict=True)]


def pairs_of(grads_and_vars) -> list[tuple]:
    """(gradient, variable) pairs, from anything that can be iterated over.

    Raises:
      ValueError: If there are none, or one is no pair.
      TypeError: If it can't be iterated over.
    """
    pairs = []
    for pair in grads_and_vars:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(
                "grads_and_vars must hold (gradient, variable) pairs, got"
                f" {pair!r}."
            )
        pairs.append(tuple(pair))
    if not pairs:
        raise ValueError("No variables provided: grads_and_vars is empty.")
    return pairs


def tensors_of(grads_and_vars: Sequence[tuple]) -> list[tuple]:
    """Pairs whose gradients are tensors, IndexedSlices or None.

    Raises:
      TypeError: If a gradient can't be a tensor.
    """

    def converted(gradient):
        if gradient is None or isinstance(gradient, tf.IndexedSlices):
            return gradient
        return tf.convert_to_tensor(gradient)

    return [(converted(g), v) for g, v in grads_and_vars]
