"""Describes the training step that `communication_plan` traces."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import checks
from tf_xshard.distribute import ownership
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.optimizers import stack
from tf_xshard.optimizers.fit import global_mean
from tf_xshard.private.keras import optimizer_state
from tf_xshard.private.tf_keras import optimizers as tf_keras_optimizers


@dataclasses.dataclass(frozen=True)
class Step:
    """Holds what a step of one replica does.

    Attributes:
      strategy: The strategy that runs it.
      inputs: Specs of the features; None if gradients are assumed.
      on_replica: A function of the features, which communicates.
      build: Creates the optimizer's variables, in the strategy's scope.
      state: Returns the optimizer's variables, after `on_replica`.
      unchanged: Returns a context in which a trace leaves no record.
      balance: Returns the balance of an update that is divided by variables.
    """

    strategy: tf.distribute.Strategy
    inputs: Any
    on_replica: Callable[[Any], None]
    build: Callable[[], None]
    state: Callable[[], Sequence]
    unchanged: Callable[[], contextlib.AbstractContextManager]
    balance: Callable[[], ownership.Balance | None]


def of(model: Any, variables: Sequence | None) -> Step:
    """Returns the step of a model or an optimizer; raises if it has none."""
    optimizer, trained, inputs = _checked(model, variables)
    gradients = functools.partial(_gradients, model, trained)
    if checks.is_of_tf_keras(optimizer):
        return _of_tf_keras(optimizer, trained, inputs, gradients)
    losses = [
        one
        for one in tf.nest.flatten(getattr(model, "loss", None))
        if isinstance(one, global_mean.GlobalMean)
    ]

    def on_replica(features: Any) -> None:
        arriving = gradients(features)
        for loss in losses:
            loss.communicate_as_in_a_call(site_lib.current())
        optimizer.apply(arriving, trained)

    @contextlib.contextmanager
    def unchanged() -> Any:
        with contextlib.ExitStack() as contexts:
            for one in stack.wrappers(optimizer):
                contexts.enter_context(one.forgetting_traces())
            yield

    return Step(
        optimizer_state.strategy_of(optimizer),
        inputs,
        on_replica,
        functools.partial(_build, optimizer, trained),
        lambda: optimizer.variables,
        unchanged,
        functools.partial(_balance, optimizer),
    )


def _of_tf_keras(
    optimizer: Any, trained: list, inputs: Any, gradients: Callable
) -> Step:
    aggregator = tf_keras_optimizers.aggregator_of(optimizer)
    assert aggregator is not None
    state: list = []

    def on_replica(features: Any) -> None:
        aggregator.reduced(list(zip(gradients(features), trained, strict=True)))

    def build() -> None:
        state.extend(tf_keras_optimizers.created_variables(optimizer, trained))

    return Step(
        next(map(replica_variables.strategy_of, trained), None)
        or tf.distribute.get_strategy(),
        inputs,
        on_replica,
        build,
        lambda: [*state, *getattr(aggregator.residuals, "residuals", ())],
        contextlib.nullcontext,
        lambda: None,
    )


def _build(optimizer: Any, variables: list) -> None:
    if not optimizer.built:
        optimizer.build(variables)


def _balance(optimizer: Any) -> ownership.Balance | None:
    """Returns the balance of the optimizer that shards its update by owner."""
    found = (
        one.balance_of_update()
        for one in stack.wrappers(optimizer)
        if hasattr(one, "balance_of_update")
    )
    return next((one for one in found if one is not None), None)


def _checked(model: Any, variables: Sequence | None) -> tuple:
    """Returns the optimizer, its variables and the specs of the inputs."""
    if isinstance(model, keras.Model) or (
        checks.is_of_tf_keras(model) and hasattr(model, "trainable_variables")
    ):
        if variables is not None:
            raise ValueError(
                "communication_plan(model) plans the model's own variables;"
                " pass variables=... only with an optimizer."
            )
        optimizer = getattr(model, "optimizer", None)
        if not model.built or not model.trainable_variables:
            raise ValueError(
                f"communication_plan(): {model.name!r} has no trainable"
                " variables yet. Begin it with a keras.layers.Input, or call"
                " build() with the shape of its inputs."
            )
        inputs = _inputs(model)
        variables = model.trainable_variables
    else:
        optimizer, inputs = model, None
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "communication_plan(): a LossScaleOptimizer is around the"
            f" optimizer {optimizer.inner_optimizer.name!r}. Put it inside the"
            " optimizer, and pass auto_scale_loss=False to compile()."
        )
    if not stack.is_wrapper(optimizer) and (
        not checks.is_of_tf_keras(optimizer)
        or tf_keras_optimizers.aggregator_of(optimizer) is None
    ):
        raise ValueError(
            "communication_plan() plans what the optimizers of tf_xshard"
            f" communicate, got {optimizer!r}. Compile the model with, for"
            " example, tf_xshard.CrossShardOptimizer(optimizer), or for"
            " tf_keras tf_xshard.tf_keras.with_aggregator(optimizer)."
        )
    assert optimizer is not None
    if variables is None:
        if not getattr(optimizer, "built", False):
            name = getattr(optimizer, "name", type(optimizer).__name__)
            raise ValueError(
                f"communication_plan(): {name} has not been built, so it does"
                " not know what it trains. Pass its variables."
            )
        variables = optimizer_state.trainable_variables(optimizer)
    if not isinstance(variables, (list, tuple)) or not all(
        isinstance(one, (keras.Variable, tf.Variable)) for one in variables
    ):
        raise TypeError(
            "communication_plan(optimizer, variables): variables must be a"
            f" list of variables, got {variables!r}."
        )
    return optimizer, list(variables), inputs


def _inputs(model: Any) -> Any:
    """Returns specs in the structure of the model's inputs; None if unknown."""
    if not getattr(model, "inputs", None):
        return None
    is_sequential = type(model).__name__ == "Sequential"
    return tf.nest.map_structure(
        lambda one: tf.TensorSpec(
            [one.shape[0] or 1, *one.shape[1:]], one.dtype
        ),
        model.inputs[0] if is_sequential else model.input,
    )


def _gradients(model: Any, variables: Sequence, features: Any) -> list:
    """Differentiates all outputs, for gradients of training's kinds."""
    if features is None:
        return [tf.zeros(v.shape, v.dtype) for v in variables]
    with tf.GradientTape() as tape:
        outputs = model(features, training=True)
        total = tf.add_n(
            [
                tf.reduce_sum(tf.cast(one, tf.float32))
                for one in tf.nest.flatten([outputs, model.losses])
            ]
        )
    return tape.gradient(
        total, list(map(replica_variables.tensorflow_variable, variables))
    )
