"""Defines `communication_plan`, which traces a step to plan its communication.

The step is the optimizer's own, with the model's kinds of gradients. Transports
record each collective (`collectives.recorder`). The traced function never runs.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import checks
from tf_xshard.collectives import recorder
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.optimizers import stack
from tf_xshard.planning import plan
from tf_xshard.private.keras import optimizer_state

_BYTES_PER_GIGABYTE = 1e9


def communication_plan(
    model: keras.Model | keras.optimizers.Optimizer,
    variables: Sequence | None = None,
    *,
    rows_per_step: int | None = None,
    gigabytes_per_second: float | tuple[float, float] | None = None,
) -> plan.CommunicationPlan:
    """Plans a training step's communication without running the step.

    Traces the optimizer's step under its strategy, and records each collective
    as it is created. Builds the optimizer if it has not been built. To build an
    optimizer of several processes, call the function on all of them.

    Args:
      model: A compiled and built model, or one of this package's optimizers.
        The plan has the model's gradients (dense, IndexedSlices or None), as if
        each output had a loss. Gradients of an optimizer, or of a model without
        `inputs` (a subclass with its own `call`), are assumed to be dense.
      variables: A list of the variables to train, for an optimizer only. None
        (default) for the variables that the optimizer was built with.
      rows_per_step: The number of different rows of an Embedding in a replica's
        batch, an int >= 1. It is only known when a step runs. None (default) if
        no gradient is IndexedSlices.
      gigabytes_per_second: The speed of a link, to show the time without
        compute. A number > 0, or a pair for links within a host and across
        hosts; each process counts as a host. None (default) for no time.

    Returns:
      A `CommunicationPlan` with `operations`, `bytes_per_step`,
      `bytes_sent_per_step`, `slot_bytes`, ...; `print` shows a table.

    Raises:
      RuntimeError: If the function is called inside `strategy.run`.
      TypeError: If an argument has the wrong type.
      ValueError: If the model is not compiled with an optimizer of this
        package, has not been built, or has an Embedding and `rows_per_step` is
        None.

    Example:

    >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Input((3,)),
    ...                               keras.layers.Dense(2)])
    ...     model.compile(tf_xshard.CrossShardOptimizer(
    ...         keras.optimizers.SGD()), "mse")
    >>> plan = tf_xshard.communication_plan(model)
    >>> int(plan.bytes_per_step), plan.operations[0].num_variables
    (32, 2)

    Source: Patarasuk and Yuan, 2009, for the bytes of a ring.
    """
    site_lib.refuse_replica_context("communication_plan()")
    speeds = _speeds(gigabytes_per_second)
    if rows_per_step is not None:
        checks.positive_integer("rows_per_step", rows_per_step)
    optimizer, variables, inputs = _checked(model, variables)
    strategy = optimizer_state.strategy_of(optimizer)
    if not optimizer.built:
        with strategy.scope():
            optimizer.build(variables)

    def on_replica(features: Any) -> None:
        with recorder.recorded(found):
            if features is None:
                gradients: list = [
                    tf.zeros(v.shape, v.dtype) for v in variables
                ]
            else:
                gradients = _gradients(model, variables, features)
            optimizer.apply(gradients, variables)

    found: recorder.Found = []
    step = tf.function(
        lambda features: strategy.run(on_replica, (features,)), autograph=False
    )
    with contextlib.ExitStack() as contexts:
        for one in stack.wrappers(optimizer):
            contexts.enter_context(one.forgetting_traces())
        contexts.enter_context(recorder.recorded(found))
        step.get_concrete_function(inputs)
    first = min((r for _, r in found if r is not None), default=None)
    collectives = [one for one, r in found if r == first]
    num_local = strategy.num_replicas_in_sync
    if site_lib.spans_processes(strategy):
        num_local = len(strategy.extended.worker_devices)
    operations = tuple(
        _planned(one, rows_per_step, speeds, num_local) for one in collectives
    )
    return plan.CommunicationPlan(
        operations,
        strategy.num_replicas_in_sync,
        sum(map(_bytes_on_a_replica, optimizer.variables)),
        sum(one.num_bytes for one in operations if one.num_variables > 1),
        speeds,
    )


def _checked(model: Any, variables: Sequence | None) -> tuple:
    """Returns the optimizer, its variables and the specs of the inputs."""
    if isinstance(model, keras.Model):
        if variables is not None:
            raise ValueError(
                "communication_plan(model) plans the model's own variables;"
                " variables=... is for an optimizer."
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
            f" optimizer {optimizer.inner_optimizer.name!r}; it belongs inside."
            " Pass auto_scale_loss=False to compile."
        )
    if not stack.is_wrapper(optimizer):
        raise ValueError(
            "communication_plan() plans what the optimizers of tf_xshard"
            f" communicate, got {optimizer!r}. Compile the model with, for"
            " example, tf_xshard.CrossShardOptimizer(optimizer)."
        )
    assert optimizer is not None
    if variables is None:
        if not optimizer.built:
            raise ValueError(
                f"communication_plan(): {optimizer.name} has not been built, so"
                " it does not know what it trains. Pass its variables."
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


def _inputs(model: keras.Model) -> Any:
    """Returns specs in the structure of the model's inputs; None if unknown."""
    if not getattr(model, "inputs", None):
        return None
    is_sequential = isinstance(model, keras.Sequential)
    return tf.nest.map_structure(
        lambda one: tf.TensorSpec(
            [one.shape[0] or 1, *one.shape[1:]], one.dtype
        ),
        model.inputs[0] if is_sequential else model.input,
    )


def _gradients(model: keras.Model, variables: Sequence, features: Any) -> list:
    """Differentiates all outputs, for gradients of training's kinds."""
    with tf.GradientTape() as tape:
        outputs = model(features, training=True)
        total = tf.add_n(
            [
                tf.reduce_sum(tf.cast(one, tf.float32))
                for one in tf.nest.flatten([outputs, model.losses])
            ]
        )
    return tape.gradient(total, [getattr(v, "value", v) for v in variables])


def _planned(
    collective: recorder.Collective,
    rows: int | None,
    speeds: tuple[Any, Any] | None,
    num_local: int,
) -> plan.PlannedOperation:
    num_bytes = collective.num_bytes
    if num_bytes is None:
        if rows is None:
            raise ValueError(
                "communication_plan(): a gradient is IndexedSlices (an"
                " Embedding), whose rows are only known when a step runs. Pass"
                " rows_per_step: how many different rows a replica's batch has."
            )
        # The collective pads the rows to a power of two.
        num_bytes = collective.bytes_per_row * (1 << (rows - 1).bit_length())
    groups = collective.groups
    sent = recorder.bytes_sent(
        collective.operation, num_bytes, groups.group_size
    )
    seconds = None
    if speeds is not None:
        across = any(
            len({replica // num_local for replica in members}) > 1
            for members in groups
        )
        seconds = sent / (speeds[across] * _BYTES_PER_GIGABYTE)
    known = {**vars(collective), "num_bytes": num_bytes}
    return plan.PlannedOperation(**known, bytes_sent=sent, seconds=seconds)


def _speeds(value: Any) -> tuple[Any, Any] | None:
    if value is None:
        return None
    pair = (value, value) if isinstance(value, numbers.Real) else value
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            "gigabytes_per_second must be a number or a pair (within a host,"
            f" across hosts), got {value!r}."
        )
    for speed in pair:
        checks.positive_number("gigabytes_per_second", speed)
    return pair[0], pair[1]


def _bytes_on_a_replica(variable: Any) -> int:
    held = replica_variables.tensorflow_variable(variable)
    return held.dtype.size * (tf.TensorShape(held.shape).num_elements() or 0)
