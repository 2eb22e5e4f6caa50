"""Updates a part of the variables on each replica of a group.

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

Optimizers that need whole variables (`kinds`) update each variable on one
replica, its owner. All replicas call the inner optimizer with all variables,
but an `Owned` variable is changed only on its owner. Gradients of variables
that another replica owns are zeros.

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
from tf_xshard.distribute import ownership
from tf_xshard.distribute import reduction_guard
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import shards as shards_lib
from tf_xshard.distribute import site as site_lib
from tf_xshard.distribute import variable_role
from tf_xshard.optimizers import stack
from tf_xshard.optimizers.update import kinds
from tf_xshard.optimizers.update import slots
from tf_xshard.optimizers.update import whole as whole_update
from tf_xshard.private.keras import moving_averages
from tf_xshard.private.keras import optimizer_state
from tf_xshard.private.keras import shards as keras_shards
from tf_xshard.private.tensorflow import autograph
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import reducer as reducer_lib

# A block of small slot variables has this many elements. Each update of one of
# them copies the block. Larger slot variables have a block of their own.
_ELEMENTS_PER_BLOCK = 1 << 14


class ShardedUpdate:
    """Divides one optimizer's variables among replicas, and updates them."""

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence,
        reducer: reducer_lib.GradientReducer,
        groups: group_assignment_lib.GroupAssignment,
        strategy: tf.distribute.Strategy,
        role_of: Callable[[Any], variable_role.VariableRole],
    ) -> None:
        self._optimizer = optimizer
        self._reducer = reducer
        self._groups = site_lib.ranked(groups, strategy)
        self._variables = list(variables)
        self._store = slots.WholeSlots(strategy, reducer.communication)
        self._divided = [
            v
            for v in variables
            if (role := role_of(v)).has_loss_gradient and role.is_reduced
        ]
        # Maps keys of variables to what stands for them in an update.
        self._shards: dict[int, keras_shards.Sharded] = {}
        # Maps keys of variables to the costs and positions of their owners.
        self.costs: dict[int, float] = {}
        self.owner_of: dict[int, int] = {}
        keras_shards.UPDATES.check()
        keras_shards.NAMES.check()

    def build(self) -> None:
        """Builds the inner optimizer with the shards."""
        self._divide()
        self._optimizer.build(
            [self._shards.get(_key(v), v) for v in self._variables]
        )
        leaves = stack.updating(self._optimizer)
        for one in leaves:
            self._divide_other_slots(one)
        self._bind_slots(
            [
                slot
                for one in leaves
                for slot in one.variables
                if isinstance(slot, keras_shards.Owned)
            ]
        )
        whole = [v for v in self._variables if _key(v) not in self._shards]
        for one in leaves:
            _check_slots(one, whole)
            keras_shards.clip_with(one, self._clipped)
        for one in stack.descendants(self._optimizer):
            moving_averages.refuse_swapped_averages(
                one,
                "SwapEMAWeights can't be used with shard_update=True, since"
                " each replica holds a shard of the averages. Use"
                " ema_overwrite_frequency, or evaluate after fit. At the end of"
                " fit, the model gets the averages.",
            )

    def _divide(self) -> None:
        """Makes shards or owners of variables, as their optimizers need."""
        # A MultiOptimizer's function may create optimizers of any class.
        for one in keras_shards.chosen(self._optimizer, self._variables):
            kinds.check(one)
        chosen = keras_shards.chosen(self._optimizer, self._divided)
        for variable, optimizer in zip(self._divided, chosen, strict=True):
            cost = kinds.cost_of_owner(
                optimizer,
                tuple(variable.shape),
                replica_variables.path(variable),
            )
            if cost is not None:
                self.costs[_key(variable)] = cost
        self.owner_of = ownership.balanced(self.costs, self._groups.group_size)
        for variable in self._divided:
            self._shards[_key(variable)] = self._divided_into(
                variable, self.owner_of.get(_key(variable))
            )

    def _divided_into(
        self, variable: Any, owner: int | None
    ) -> keras_shards.Sharded:
        """Returns what stands for a variable in an update."""
        shape = tuple(int(n) for n in variable.shape)
        layout: Any = shards_lib.Layout(shape, self._groups)
        size, kind = layout.size, keras_shards.Sharded
        if owner is not None:
            layout = ownership.Owned(shape, self._groups, owner)
            size, kind = 0, keras_shards.Owned
        own = _untrained(size, variable.dtype)
        keras_shards.weight_of(own, variable, layout, self._store, kind)
        if owner is None:
            # The slot variables of some optimizers start with its value.
            self._store.fill(own, variable)
        return own

    def _divide_other_slots(
        self, optimizer: keras.optimizers.Optimizer
    ) -> None:
        """Gives slots that were created without a reference to the owners."""
        for variable, slot in keras_shards.slots_by_variable(optimizer):
            owner = self.owner_of.get(_key(variable))
            if owner is not None and not isinstance(slot, keras_shards.Sharded):
                layout = ownership.Owned(tuple(slot.shape), self._groups, owner)
                keras_shards.owned(slot, layout, self._store)

    def _bind_slots(self, found: Sequence[keras_shards.Owned]) -> None:
        """Creates the blocks of owned slot variables."""
        for pack in ownership.packs(
            [one.layout.owner for one in found],
            [one.layout.shape for one in found],
            [one.dtype for one in found],
            self._groups.group_size,
            _ELEMENTS_PER_BLOCK,
        ):
            block = _untrained(pack.row_size, found[pack.members[0]].dtype)
            for index, offset in pack.offsets().items():
                found[index].bind(block.value, offset)

    def _clipped(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[tf.Tensor],
        variables: Sequence,
    ) -> list[tf.Tensor]:
        """Clips shards as Keras clips whole gradients."""
        gradients = [tf.convert_to_tensor(one) for one in gradients]
        if optimizer.clipnorm and optimizer.clipnorm > 0:
            norm = optimizer.clipnorm
            squares = self._squares(optimizer, gradients, variables)
            return [
                gradient
                * tf.cast(
                    norm / tf.maximum(tf.sqrt(square), norm), gradient.dtype
                )
                for gradient, square in zip(gradients, squares, strict=True)
            ]
        if optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
            norm = optimizer.global_clipnorm
            squares = self._squares(optimizer, gradients, variables)
            total = tf.sqrt(tf.add_n(squares))
            # `total - total` makes the scale NaN if the norm is not finite.
            scale = norm * tf.minimum(1.0 / total, 1.0 / norm) + (total - total)
            return [one * tf.cast(scale, one.dtype) for one in gradients]
        bound = optimizer.clipvalue
        if bound and bound > 0:
            return [tf.clip_by_value(one, -bound, bound) for one in gradients]
        return gradients

    def _squares(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[tf.Tensor],
        variables: Sequence,
    ) -> list[tf.Tensor]:
        """Returns the squared norms of whole gradients, in at least float32."""
        dtype = tf.float32
        if any(one.dtype == tf.float64 for one in gradients):
            dtype = tf.float64
        own = tf.stack(
            [tf.reduce_sum(tf.square(tf.cast(one, dtype))) for one in gradients]
        )
        # A local variable's gradient is whole on each replica.
        is_divided = [isinstance(v, keras_shards.Sharded) for v in variables]
        return tf.unstack(
            tf.where(is_divided, self._sum_over_group(optimizer, own), own),
            len(gradients),
        )

    def _sum_over_group(
        self, optimizer: keras.optimizers.Optimizer, squares: tf.Tensor
    ) -> tf.Tensor:
        """Returns the group's sums of squares, of shape [num_gradients]."""
        count = squares.shape[0]
        # Groups may have different gradients, but take part in one operation.
        num_variables = len(optimizer_state.trainable_variables(optimizer))
        padded = tf.pad(squares, [[0, num_variables - count]])
        labelled = recorder.labelled("norms", counts=[count])
        with reduction_guard.lifted(), labelled:
            transport = self._reducer.transport(
                site_lib.current(), self._groups
            )
            [total] = transport.sum([padded])
        return total[:count]

    def balance(self) -> ownership.Balance | None:
        """Returns how evenly owners divide the update; None without owners."""
        found = ownership.balance_of(
            self.costs, self.owner_of, self._groups.group_size
        )
        if found is None:
            return None
        variable = self._shards[found.variable].whole
        return found._replace(variable=replica_variables.path(variable))

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

    def _is_split(self, variable: Any) -> bool:
        """Returns True if each replica has a shard, so that none owns it."""
        key = _key(variable)
        return key in self._shards and key not in self.owner_of

    def _own(self, variable: Any, whole: Any, position: Any) -> tf.Tensor:
        owner = self.owner_of.get(_key(variable))
        if isinstance(whole, tf.IndexedSlices):
            return reducer_lib.part_of_rows(
                whole, variable, owner, self._groups, position
            )
        if owner is not None:
            return ownership.only_for_owner(whole, owner, position)
        return self._shards[_key(variable)].layout.shard(whole, position)

    def apply(
        self,
        batch: gradients_lib.GradientBatch,
        site: site_lib.Site,
        is_applied: tf.Tensor | None,
    ) -> None:
        """Updates this replica's shards, and gathers the variables."""
        leaves = stack.updating(self._optimizer)
        has_gradient = {
            _key(v) for gradient, v in batch.pairs() if gradient is not None
        }
        refreshed = gathered = batch.variables
        changed = has_gradient
        if any(one.use_ema for one in leaves):
            # An update changes the moving averages of all variables.
            refreshed = self._variables
        steps = _steps_per_update(leaves)
        if any(getattr(v, "constraint", None) for v in gathered):
            # Plain Keras constrains variables between updates, too.
            steps = 1
        if any(one.ema_overwrite_frequency for one in leaves):
            # Plain Keras overwrites all variables, also between updates.
            gathered, changed, steps = refreshed, set(map(_key, refreshed)), 1
        # A MultiOptimizer does not call an optimizer that gets no gradient.
        is_update = steps > 1 and tf.reduce_any(
            [
                (optimizer_state.num_calls(one) + 1) % steps == 0
                for one in leaves
            ]
        )
        position = self._position(site)
        for variable in filter(self._is_split, refreshed):
            whole = replica_variables.read(variable)
            replica_variables.assign(
                self._shards[_key(variable)],
                self._own(variable, whole, position),
            )
        with keras_shards.at(position):
            whole_update.apply(
                self._optimizer,
                gradients_lib.GradientBatch(
                    batch.values,
                    [self._shards.get(_key(v), v) for v in batch.variables],
                ),
            )
        gather = functools.partial(
            self._gather, gathered, changed, has_gradient, site, is_applied
        )
        if steps == 1:
            gather()
            return
        with recorder.labelled(every=steps):
            replica_variables.cond(is_update, gather)

    def _gather(
        self,
        variables: Sequence,
        changed: set[int],
        has_gradient: set[int],
        site: site_lib.Site,
        is_applied: tf.Tensor | None,
    ) -> None:
        """Gathers the variables that may have changed."""
        split = [v for v in variables if self._is_split(v)]
        owned = [v for v in variables if _key(v) in self.owner_of]
        shards = [self._shards[_key(v)] for v in split]
        wholes = self._reducer.all_gather(
            [replica_variables.read(one) for one in shards],
            [one.layout for one in shards],
            site,
            self._groups,
            [_key(v) in changed for v in split],
        ) + self._reducer.gather_from_owners(
            [replica_variables.read(v) for v in owned],
            [self.owner_of[_key(v)] for v in owned],
            site,
            self._groups,
            [_key(v) in changed for v in owned],
        )
        pairs = zip([*split, *owned], wholes, strict=True)
        for variable, whole in pairs:
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
    """Returns a weight's key, also for what stands for it in an update."""
    return replica_variables.key(keras_shards.weight(variable))


def _steps_per_update(leaves: Sequence) -> int:
    """Returns after how many steps variables change; 1 if they may always."""
    steps = {one.gradient_accumulation_steps or 1 for one in leaves}
    return steps.pop() if len(steps) == 1 else 1


def _untrained(size: int, dtype: str) -> keras.Variable:
    return keras.Variable(
        tf.zeros([size], dtype), dtype=dtype, trainable=False, autocast=False
    )


def _check_slots(
    optimizer: keras.optimizers.Optimizer, undivided: Sequence
) -> None:
    whole = {
        id(slot)
        for variable, slot in keras_shards.slots_by_variable(optimizer)
        if not isinstance(variable, keras_shards.Sharded)
    }
    names = tuple(f"{replica_variables.flat_name(v)}_" for v in undivided)
    for slot in optimizer.variables:
        if (
            not isinstance(slot, keras_shards.Sharded)
            and len(slot.shape)
            and id(slot) not in whole
            and not slot.path.split("/")[-1].startswith(names)
        ):
            raise ValueError(
                f"shard_update=True: {optimizer.name} has created"
                f" {slot.path!r} of shape {tuple(slot.shape)} in a way that"
                " does not show which variable it belongs to. Create slot"
                " variables with add_variable_from_reference or"
                " add_optimizer_variables."
            )
