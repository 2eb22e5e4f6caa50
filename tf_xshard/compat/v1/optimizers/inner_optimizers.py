"""Adapts a TF1 wrapper's inner optimizer, from v1 or from Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.optimizers.update import whole
from tf_xshard.private.keras import optimizer_state
from tf_xshard.private.tensorflow import autograph
from tf_xshard.private.tensorflow import v1 as tensorflow_v1
from tf_xshard.reduction import gradients as gradients_lib


class V1:
    """Adapts a v1 optimizer."""

    def __init__(self, optimizer: tf.compat.v1.train.Optimizer) -> None:
        self.optimizer = optimizer

    def leave_out_the_sum(self) -> None:
        """Makes the optimizer apply gradients without summing over replicas."""
        tensorflow_v1.take_out_the_sum(self.optimizer)

    def anew(self) -> V1:
        """Copies the optimizer without its state, for another shard."""
        result = V1(tensorflow_v1.stateless_copy(self.optimizer))
        result.leave_out_the_sum()
        return result

    def apply(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: tf.Variable | None,
        **kwargs: Any,
    ) -> tf.Operation | None:
        """Applies gradients."""
        self._show_state()
        return self.optimizer.apply_gradients(
            grads_and_vars, global_step=global_step, **kwargs
        )

    def _show_state(self, variable: Any = None) -> None:
        """Shows the state of a variable's graph, or of the current graph."""
        with tf.init_scope():
            graph = getattr(variable, "graph", None)
            if graph is None and not tf.executing_eagerly():
                graph = tf.compat.v1.get_default_graph()
        if graph is not None:
            tensorflow_v1.show_state_of(self.optimizer, graph)

    def get_name(self) -> str:
        """Returns the optimizer's name."""
        return self.optimizer.get_name()

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Returns a slot, usually of `var`'s shape, or None."""
        self._show_state(var)
        return self.optimizer.get_slot(var, name)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> list[str]:
        """Lists the names of the optimizer's slots."""
        return self.optimizer.get_slot_names(*args, **kwargs)

    def variables(self) -> list[tf.Variable]:
        """Lists the slots, and the state that is not per variable."""
        self._show_state()
        return self.optimizer.variables()

    def restore_slot(self, **kwargs: Any) -> None:
        """Restores a slot from a tf.train.Checkpoint."""
        self._show_state()
        tensorflow_v1.restore_slot(self.optimizer, **kwargs)


class Keras:
    """Gives a Keras optimizer the v1 methods."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self.optimizer = optimizer

    def leave_out_the_sum(self) -> None:
        """Makes the optimizer apply gradients without summing over replicas."""
        whole.make_local(self.optimizer)

    def anew(self) -> Keras:
        """Copies the optimizer without its state, for another shard."""
        with tf.init_scope():
            result = Keras(
                type(self.optimizer).from_config(self.optimizer.get_config())
            )
        result.leave_out_the_sum()
        return result

    def get_name(self) -> str:
        """Returns the optimizer's name."""
        return self.optimizer.name

    def apply(
        self,
        grads_and_vars: Sequence[tuple[Any, Any]],
        global_step: tf.Variable | None,
        name: str | None = None,
    ) -> tf.Operation | None:
        """Applies gradients."""
        self.check_graph()
        variables = [v for _, v in grads_and_vars]
        if not any(g is not None for g, _ in grads_and_vars):
            names = [v.name for v in variables]
            raise ValueError(
                f"No gradients provided for any variable: {names}. The loss"
                " must depend on them."
            )
        if not self.optimizer.built:
            with tf.init_scope():
                self.optimizer.build(variables)
        gradients = [g for g, _ in grads_and_vars]
        whole.apply(
            self.optimizer, gradients_lib.GradientBatch(gradients, variables)
        )
        # A tf.function runs operations in the order in which they are made, so
        # the increment needs no control dependency.
        if global_step is not None:
            global_step.assign_add(tf.ones([], global_step.dtype))
        return None if tf.executing_eagerly() else tf.no_op(name)

    def check_graph(self) -> None:
        """Raises TypeError in a graph that a Session runs."""
        if not tf.executing_eagerly() and not isinstance(
            tf.compat.v1.get_default_graph(), tf.__internal__.FuncGraph
        ):
            raise TypeError(
                "A Keras optimizer can't be used in a tf.Graph with a Session:"
                " its apply() returns no operation that a Session could run."
                " Use an optimizer of tf.compat.v1.train, or use the Keras"
                " optimizer eagerly or in a tf.function."
            )

    def get_slot(self, var: Any, name: str) -> Any:
        """Returns the slot `name` of `var`, of `var`'s shape, or None."""
        return dict(self._slots_of(var)).get(name)

    def get_slot_names(self) -> list[str]:
        """Lists the names of the slots that exist per trained variable."""
        names: list[str] = []
        for var in optimizer_state.trainable_variables(self.optimizer):
            names += [name for name, _ in self._slots_of(var)]
        return sorted(set(names))

    def _slots_of(self, var: Any) -> Iterator[tuple[str, Any]]:
        # Keras names a slot "<variable's path with _ for />_<name>".
        path = getattr(var, "path", None) or var.name
        prefix = path.replace("/", "_").replace(":", "_") + "_"
        positions = optimizer_state.indices_of(self.optimizer, [var])
        if not positions:
            return
        count = len(optimizer_state.trainable_variables(self.optimizer))
        for value in vars(self.optimizer).values():
            if not isinstance(value, (list, tuple)) or len(value) != count:
                continue
            slot = value[positions[0]]
            name = getattr(slot, "name", None) or ""
            if slot is not var and name.startswith(prefix):
                yield name.removeprefix(prefix), slot

    def variables(self) -> list[keras.Variable]:
        """Lists all of the optimizer's variables."""
        return list(self.optimizer.variables)

    def restore_slot(self, **kwargs: Any) -> None:
        """Does nothing, because Keras optimizers restore their variables."""


def of(opt: Any) -> V1 | Keras:
    """Returns an adapter for a user's optimizer."""
    if isinstance(opt, tf.compat.v1.train.Optimizer):
        return V1(opt)
    if isinstance(opt, keras.optimizers.Optimizer):
        result = Keras(opt)
        result.check_graph()
        return result
    raise TypeError(
        "The wrapped optimizer must be one of tf.compat.v1.train.Optimizer or"
        f" keras.optimizers.Optimizer, got {type(opt).__name__}."
    )


def check_loss(loss: Any) -> None:
    """Raises TypeError for what is neither a tensor nor a function."""
    if loss is None or isinstance(loss, (list, tuple)):
        raise TypeError(f"loss must be a tensor or a function, got {loss!r}.")


def compute_gradients(
    inner: V1 | Keras,
    compute: Callable[..., list[tuple[Any, Any]]],
    loss: Any,
    var_list: Any = None,
    **kwargs: Any,
) -> list[tuple[Any, Any]]:
    """Computes gradients with the inner v1 optimizer, or with `compute`."""
    check_loss(loss)
    if callable(loss) and not tf.is_tensor(loss):
        loss = autograph.as_called_by_user(loss)
    if isinstance(inner, V1):
        return inner.optimizer.compute_gradients(
            loss, var_list=var_list, **kwargs
        )
    if var_list is None:
        return compute(loss, **kwargs)
    # v1 takes TensorFlow variables, which Keras variables hold in `value`.
    var_list = tf.nest.flatten(var_list)
    inside = [v.value if isinstance(v, keras.Variable) else v for v in var_list]
    pairs = compute(loss, var_list=inside, **kwargs)
    return [(g, v) for (g, _), v in zip(pairs, var_list, strict=True)]
