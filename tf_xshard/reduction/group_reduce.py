"""Defines `group_reduce`, which reduces a user's values over groups."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import reductions
from tf_xshard.distribute import indexed_slices
from tf_xshard.distribute import lone_training
from tf_xshard.distribute import site as site_lib
from tf_xshard.private.keras import symbolic_calls
from tf_xshard.private.tensorflow import autograph
from tf_xshard.private.tensorflow import custom_gradient
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import reducer


@dataclasses.dataclass(frozen=True)
class _Place:
    """Stands in for a variable, with the attributes that a reduction reads."""

    name: str
    shape: tf.TensorShape
    dtype: None = None


@autograph.entry_point
def group_reduce(
    values: Any,
    group_assignment: (
        group_assignment_lib.GroupAssignment | Sequence | np.ndarray | None
    ) = None,
    reduction: str = "mean",
    *,
    communication: communication_lib.Communication | None = None,
) -> Any:
    """Reduces each replica's values over its group.

    Use it for gradients or statistics in a custom training loop, or in a layer
    or a loss that `fit` calls. It uses the collectives of
    `CrossShardOptimizer`. Call it in replica context, inside `strategy.run`.
    Without a strategy, it returns the values unchanged. It does not undo a
    division of the loss by the number of replicas, so use `reduction="sum"` for
    gradients of such a loss. Don't pass reduced gradients to a Keras optimizer,
    which sums gradients over all replicas again. Wrap the optimizer in a
    `CrossShardOptimizer` instead.

    The gradient of `group_reduce` is the same reduction of the gradients that
    arrive at its results. All replicas of a group must compute this gradient,
    or none.

    Args:
      values: A nested structure of floating point tensors of known shapes,
        `tf.IndexedSlices` (with a `dense_shape`) and None, the same structure
        on all replicas. None stays None, and must be None on all replicas.
      group_assignment: A `GroupAssignment`, or a nested list of replica ids of
        shape `[num_groups, replicas_per_group]`. None (default) for one group
        of all replicas.
      reduction: `"mean"` (default) or `"sum"` over the replicas of a group.
      communication: A `Communication`. None (default) for its defaults.

    Returns:
      The same structure, bitwise equal on all replicas of a group.
      IndexedSlices stay IndexedSlices, with unique indices, except on TPUs.

    Raises:
      RuntimeError: In cross-replica context, or in one of several processes
        whose strategy has only this process (see `connect`).
      TypeError: If an argument has the wrong type, or a value is not a floating
        point number.
      ValueError: If an argument is invalid, a shape is unknown, the groups do
        not fit the strategy, replicas pass different structures, shapes or
        types, or several processes were started and there is no strategy.

    Example:

    >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> @tf.function
    ... def mean_of_ids():
    ...     def on_replica():
    ...         context = tf.distribute.get_replica_context()
    ...         own = tf.cast(context.replica_id_in_sync_group, tf.float32)
    ...         return tf_xshard.group_reduce({"id": own}, [[0, 1]])
    ...     return strategy.run(on_replica)
    >>> [float(x) for x in strategy.experimental_local_results(
    ...     mean_of_ids()["id"])]
    [0.5, 0.5]

    Source: `horovod.tensorflow.DistributedGradientTape`;
    `tf.distribute.ReplicaContext.all_reduce`, which has no groups.
    """
    how = reductions.checked(reduction)
    communication = communication_lib.checked(communication)
    if communication.error_feedback:
        raise ValueError(
            "Communication(error_feedback=True) keeps variables, which only an"
            " optimizer has. Pass error_feedback=False to group_reduce."
        )
    if group_assignment is not None:
        group_assignment = group_assignment_lib.GroupAssignment(
            group_assignment
        )
    if symbolic_calls.is_running():
        return values
    site = _site()
    flat = tf.nest.flatten(values)
    present = [i for i, value in enumerate(flat) if value is not None]
    places = [_place(i, flat[i]) for i in present]
    gradients = gradients_lib.standardized([flat[i] for i in present], places)
    groups = group_assignment_lib.for_replicas(
        group_assignment,
        site.num_replicas,
        f"the strategy {type(site.strategy).__name__}",
    )
    own = gradients_lib.GradientBatch(gradients, places)
    reducers = _reducers(group_assignment, communication)
    reduced = _reduced(own, site, groups, how, reducers)
    for i, value in zip(present, reduced.values, strict=True):
        flat[i] = value
    return tf.nest.pack_sequence_as(values, flat)


def _site() -> site_lib.Site:
    """Returns where values are reduced; raises an error outside of `run`."""
    if tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            "group_reduce() is called in cross-replica context, where there is"
            " no replica whose values it could reduce. Call it in the function"
            " that you pass to strategy.run()."
        )
    site = site_lib.current()
    engine, size = lone_training.num_started()
    if size > 1 and site_lib.is_default(site.strategy):
        raise ValueError(
            "group_reduce() is called outside of strategy.run(), where each of"
            f" the {size} processes ({engine}) would keep its own values. Call"
            " it in the function that you pass to strategy.run()."
        )
    if size > 1:
        lone_training.refuse(site.strategy, "group_reduce() is called")
    return site


def _reduced(
    own: gradients_lib.GradientBatch,
    site: site_lib.Site,
    groups: group_assignment_lib.GroupAssignment,
    reduction: reductions.Reduction,
    reducers: reducer.ReducerOfEachFunction,
) -> gradients_lib.GradientBatch:
    """Reduces values; their gradient is the reduction of upstream gradients.

    Collectives have no gradients of their own, or wrong ones.
    """
    if groups.group_size == 1 or not own.values:
        return own
    reduced, _ = reducers.current().all_reduce(
        own.with_values(_with_tensors(own.values, tf.stop_gradient)),
        site,
        groups,
        reduction,
    )

    def gradient(*upstream: Any) -> list[tf.Tensor]:
        rest = iter(upstream)
        values = gradients_lib.standardized(
            _with_tensors(
                reduced.values, lambda _: tf.convert_to_tensor(next(rest))
            ),
            own.variables,
        )
        of_results = _reduced(
            own.with_values(values), site, groups, reduction, reducers
        )
        return [
            _like(value, one, place)
            for value, (one, place) in zip(
                of_results.values, own.pairs(), strict=True
            )
        ]

    results = iter(
        custom_gradient.with_gradient(
            [_tensor(one) for one in reduced.values],
            [_tensor(one) for one in own.values],
            gradient,
        )
    )
    return reduced.with_values(
        _with_tensors(reduced.values, lambda _: next(results))
    )


def _with_tensors(values: Sequence, function: Callable) -> list:
    """Applies a function to dense values, and to the values of rows."""
    return [indexed_slices.map_values(function, one) for one in values]


def _tensor(value: indexed_slices.Gradient) -> tf.Tensor:
    return value.values if isinstance(value, tf.IndexedSlices) else value


def _like(
    gradient: indexed_slices.Gradient,
    value: indexed_slices.Gradient,
    place: _Place,
) -> tf.Tensor:
    """Returns the gradient of a dense value, or of the values of its rows."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = indexed_slices.dense(gradient, place)
    if isinstance(value, tf.IndexedSlices):
        return tf.gather(gradient, value.indices)
    return gradient


@functools.cache
def _reducers(
    group_assignment: group_assignment_lib.GroupAssignment | None,
    communication: communication_lib.Communication,
) -> reducer.ReducerOfEachFunction:
    del group_assignment
    return reducer.ReducerOfEachFunction(communication)


def _place(index: int, value: Any) -> _Place:
    """Makes a stand-in for a variable of the value's shape."""
    name = f"value_{index}"
    is_sparse = isinstance(value, tf.IndexedSlices)
    dense = tf.convert_to_tensor(value.values if is_sparse else value)
    if not is_sparse:
        shape = dense.shape
    elif value.dense_shape is None:
        shape = tf.TensorShape(None)
    else:
        rows = tf.get_static_value(tf.convert_to_tensor(value.dense_shape))
        shape = tf.TensorShape(None if rows is None else rows.tolist())
    if dense.dtype not in gradients_lib.SUMMABLE:
        raise TypeError(
            f"group_reduce() reduces floating point values, but {name} has type"
            f" {dense.dtype.name}. Cast it, tf.cast(value, tf.float32), or use"
            " tf.distribute.ReplicaContext.all_reduce for other types."
        )
    if not shape.is_fully_defined():
        raise ValueError(
            f"group_reduce() needs values of known shapes, but {name} has the"
            f" shape {shape}. Use tf.ensure_shape, and for IndexedSlices pass"
            " dense_shape."
        )
    return _Place(name, shape)
