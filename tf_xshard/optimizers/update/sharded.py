"""Updates a shard of each variable on each replica of a group.

replica r of a group of g:

gradients of r   [g0 g1 g2 g3]
  reduce-scatter      |         the group's mean or sum, of this shard
shard of r           [g1]
  inner optimizer     |         its slot variables have the shard's size
updated shard        [w1]
  all-gather          |
variables        [w0 w1 w2 w3]

The inner optimizer is built with the shards, variables of rank 1. Each update
fills them from the weights first, so only slot variables are state.

Clipping by a norm needs the norms of whole gradients, one small sum per group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.collectives import recorder
from tf_xshard.distribute import reduction_guard
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.distribute import variable_role
from tf_xshard.optimizers import stack
from tf_xshard.optimizers.update import elementwise
from tf_xshard.optimizers.update import slots
from tf_xshard.optimizers.update import whole as whole_update
from tf_xshard.private.keras import moving_averages
from tf_xshard.private.keras import optimizer_state
from tf_xshard.private.keras import shards as keras_shards
from tf_xshard.private.tensorflow import autograph
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import reducer as reducer_lib


def use(
    optimizer: keras.optimizers.Optimizer,
    reducer: reducer_lib.GradientReducer,
    groups: group_assignment_lib.GroupAssignment,
) -> None:
    """Makes an optimizer clip by the norms of whole gradients."""
    num_variables = len(optimizer_state.trainable_variables(optimizer))

    keras_shards.clip_with(
        optimizer,
        functools.partial(
            _clipped,
            functools.partial(_sum_over_group, reducer, groups, num_variables),
        ),
    )


def _sum_over_group(
    reducer: reducer_lib.GradientReducer,
    groups: group_assignment_lib.GroupAssignment,
    num_variables: int,
    squares: tf.Tensor,
) -> tf.Tensor:
    """Returns the group's sums of squares, of shape [number of gradients]."""
    count = squares.shape[0]
    # Groups may have different gradients, but take part in one operation.
    padded = tf.pad(squares, [[0, num_variables - count]])
    labelled = recorder.labelled("norms", counts=[count])
    with reduction_guard.lifted(), labelled:
        [total] = reducer.transport(site_lib.current(), groups).sum([padded])
    return total[:count]


def _clipped(
    sum_over_group: Callable[[tf.Tensor], tf.Tensor],
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Clips shards as Keras clips whole gradients."""
    gradients = [tf.convert_to_tensor(one) for one in gradients]
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        norm = optimizer.clipnorm
        squares = _squares(gradients, sum_over_group)
        return [
            gradient
            * tf.cast(norm / tf.maximum(tf.sqrt(square), norm), gradient.dtype)
            for gradient, square in zip(gradients, squares, strict=True)
        ]
    if optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
        norm = optimizer.global_clipnorm
        squares = _squares(gradients, sum_over_group)
        total = tf.sqrt(tf.add_n(squares))
        # `total - total` makes the scale NaN if the norm is not finite.
        scale = norm * tf.minimum(1.0 / total, 1.0 / norm) + (total - total)
        return [
            gradient * tf.cast(scale, gradient.dtype) for gradient in gradients
        ]
    bound = optimizer.clipvalue
    if bound and bound > 0:
        return [tf.clip_by_value(one, -bound, bound) for one in gradients]
    return gradients


def _squares(
    gradients: Sequence[tf.Tensor],
    sum_over_group: Callable[[tf.Tensor], tf.Tensor],
) -> list[tf.Tensor]:
    """Returns the squared norms of whole gradients, in at least float32."""
    dtype = tf.float32
    if any(one.dtype == tf.float64 for one in gradients):
        dtype = tf.float64
    own = tf.stack(
        [tf.reduce_sum(tf.square(tf.cast(one, dtype))) for one in gradients]
    )
    return tf.unstack(sum_over_group(own), len(gradients))


class ShardedUpdate:
    """Holds the shards of one optimizer's variables, and updates them."""

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence,
        reducer: reducer_lib.GradientReducer,
        groups: group_assignment_lib.GroupAssignment,
        strategy: tf.distribute.Strategy,
    ) -> None:
        self._optimizer = optimizer
        self._reducer = reducer
        self._groups = groups
        self._variables = list(variables)
        keras_shards.UPDATES.check()
        keras_shards.NAMES.check()
        store = slots.WholeSlots(strategy, groups, reducer.communication)
        self._shards = {
            _key(variable): _shards_of(variable, store)
            for variable in variables
            if variable_role.role_of(variable).has_loss_gradient
        }

    def build(self) -> None:
        """Builds the inner optimizer with the shards."""
        with whole_update.changing_when_chosen(
            self._optimizer, elementwise.check
        ):
            self._optimizer.build(
                [self._shards.get(_key(v), v) for v in self._variables]
            )
        for one in stack.descendants(self._optimizer):
            _check_slots(one)
            moving_averages.refuse_swapped_averages(
                one,
                "SwapEMAWeights can't be used with shard_update=True, since"
                " each replica holds a shard of the averages. Use"
                " ema_overwrite_frequency, or evaluate after fit. At the end of"
                " fit, the model gets the averages.",
            )
            if not any(stack.children(one)):
                use(one, self._reducer, self._groups)

    def own_shards(
        self, batch: gradients_lib.GradientBatch, site: site_lib.Site
    ) -> gradients_lib.GradientBatch:
        """Returns this replica's shards of whole gradients."""
        position = self._position(site)
        return batch.with_values(
            None if whole is None else self._own(variable, whole, position)
            for whole, variable in batch.pairs()
        )

    def _position(self, site: site_lib.Site) -> Any:
        return self._reducer.transport(site, self._groups).position()

    def _own(self, variable: Any, whole: Any, position: Any) -> tf.Tensor:
        layout = self._shards[_key(variable)].layout
        if isinstance(whole, tf.IndexedSlices):
            return layout.shard_of_rows(whole, position)
        return layout.shard(whole, position)

    def apply(
        self,
        batch: gradients_lib.GradientBatch,
        site: site_lib.Site,
        is_applied: tf.Tensor | None,
    ) -> None:
        """Updates this replica's shards, and gathers the variables."""
        variables = batch.variables
        optimizers = list(stack.descendants(self._optimizer))
        refreshed = variables
        if any(one.use_ema for one in optimizers):
            # An update changes the moving averages of all variables.
            refreshed = self._variables
        position = self._position(site)
        for variable in refreshed:
            if _key(variable) in self._shards:
                replica_variables.assign(
                    self._shards[_key(variable)],
                    self._own(
                        variable, replica_variables.read(variable), position
                    ),
                )
        whole_update.apply(
            self._optimizer,
            gradients_lib.GradientBatch(
                batch.values, [self._shards.get(_key(v), v) for v in variables]
            ),
        )
        has_gradient = {
            _key(v) for gradient, v in batch.pairs() if gradient is not None
        }
        overwritten = any(one.ema_overwrite_frequency for one in optimizers)
        self._gather(
            refreshed if overwritten else variables,
            has_gradient,
            overwritten,
            site,
            is_applied,
        )

    def _gather(
        self,
        variables: Sequence,
        has_gradient: set[int],
        overwritten: bool,
        site: site_lib.Site,
        is_applied: tf.Tensor | None,
    ) -> None:
        """Gathers the variables that may have changed."""
        sharded = [v for v in variables if _key(v) in self._shards]
        shards = [self._shards[_key(v)] for v in sharded]
        layouts = [one.layout for one in shards]
        wholes = self._reducer.all_gather(
            [replica_variables.read(one) for one in shards],
            layouts,
            site,
            self._groups,
            [overwritten or _key(v) in has_gradient for v in sharded],
        )
        for variable, whole in zip(sharded, wholes, strict=True):
            if whole is None:
                continue
            constraint = getattr(variable, "constraint", None)
            if constraint is not None and _key(variable) in has_gradient:
                constrained = autograph.as_called_by_user(constraint)(whole)
                whole = (
                    constrained
                    if is_applied is None
                    else tf.where(is_applied, constrained, whole)
                )
            replica_variables.assign(variable, whole)


def _key(variable: Any) -> int:
    """Returns one key for a Keras variable and its TensorFlow variable."""
    return id(replica_variables.tensorflow_variable(variable))


def _shards_of(variable: Any, store: slots.WholeSlots) -> keras_shards.Sharded:
    layout = store.layout(variable)
    shards = keras_shards.shard_of(
        keras.Variable(
            tf.zeros([layout.size], variable.dtype),
            dtype=variable.dtype,
            trainable=False,
            autocast=False,
        ),
        variable,
        layout,
        store,
    )
    # The slot variables of some optimizers start with the variable's value.
    slots.copy_into(variable, shards)
    return shards


def _check_slots(optimizer: keras.optimizers.Optimizer) -> None:
    for slot in optimizer.variables:
        if not isinstance(slot, keras_shards.Sharded) and len(slot.shape):
            raise ValueError(
                f"shard_update=True: {optimizer.name} has created"
                f" {slot.path!r} of shape {tuple(slot.shape)} in a way that"
                " does not show which variable it belongs to. Create slot"
                " variables with add_variable_from_reference or"
                " add_optimizer_variables."
            )
