"""Defines the base class of tf_xshard's Keras optimizers."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import checks
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import lone_training
from tf_xshard.distribute import reduction_guard
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.distribute import variable_role
from tf_xshard.optimizers import arguments
from tf_xshard.optimizers import commit
from tf_xshard.optimizers import run as run_lib
from tf_xshard.optimizers import saving as saving_lib
from tf_xshard.optimizers import skipping
from tf_xshard.optimizers import stack
from tf_xshard.optimizers.fit import scalar_loss
from tf_xshard.optimizers.update import whole
from tf_xshard.private.keras import local_optimizers
from tf_xshard.private.keras import optimizer_state
from tf_xshard.private.keras import saving as keras_saving
from tf_xshard.private.keras import shards as keras_shards
from tf_xshard.private.keras import wrapper_internals
from tf_xshard.private.tensorflow import autograph
from tf_xshard.private.tensorflow import tracing
from tf_xshard.reduction import error_feedback
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import reducer as reducer_lib


def _forwarded(name: str) -> property:
    """Returns a property for an attribute of the updating optimizer."""

    def get(self: Any) -> Any:
        return getattr(self._updating_optimizer, name)

    def set_(self: Any, value: Any) -> None:
        # Ignore the defaults that the base class's constructor sets before
        # there is an inner optimizer.
        if "inner_optimizer" in self.__dict__:
            setattr(self._updating_optimizer, name, value)

    return property(get, set_, doc=f"The inner optimizer's `{name}`.")


class GradientWrapper(wrapper_internals.WrapperInternals):
    """Passes reduced gradients to an inner optimizer."""

    # Subclasses override `_create_state`, `_step` and `get_config`. The inner
    # optimizer's settings act on the gradients that `_step` passes to it. Each
    # attribute is forwarded by name, not by `__getattr__`.

    is_tf_xshard_wrapper = True
    # Whether `_reducer` belongs to this wrapper, not to a wrapper inside.
    has_own_reducer = True
    # Whether a wrapper without groups takes the groups of a wrapper around it.
    follows_groups_around = False
    # True if some gradients are not reduced.
    has_local_variables = False
    # Whether a TowerOptimizer, not a user, added this CrossShardOptimizer.
    is_implicit = False
    # Whether a LossScaleOptimizer may be inside.
    _supports_loss_scaling = True
    _has_checked_losses = False
    _error_feedback: error_feedback.Residuals | None = None
    _counter: skipping.SkipCounter | None = None
    _skipped: keras.Variable | None = None
    inner_optimizer: keras.optimizers.Optimizer

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        *,
        reduction: str,
        loss_normalization: str | None,
        skip_nonfinite: bool | None,
        max_consecutive_skips: int | None,
        name: str,
        reducer: reducer_lib.GradientReducer,
        group_assignment: group_assignment_lib.GroupAssignment | None = None,
        **kwargs: Any,
    ) -> None:
        own_name = type(self).__name__
        how = arguments.check(
            own_name, inner_optimizer, reduction, loss_normalization, kwargs
        )
        if skip_nonfinite is not None:
            skip_nonfinite = checks.boolean("skip_nonfinite", skip_nonfinite)
        strategy = tf.distribute.get_strategy()
        site_lib.check_devices(strategy)
        settings = {
            "loss_normalization": loss_normalization,
            "skip_nonfinite": skip_nonfinite,
            "max_consecutive_skips": skipping.checked_limit(
                max_consecutive_skips, strategy
            ),
        }
        self._set_untracked(
            "_own_part",
            saving_lib.LossySaveWarning(
                name, self._lost_now, self._own_children
            ),
        )
        # A callable avoids a learning rate variable, which would be saved but
        # never used.
        super().__init__(learning_rate=_no_learning_rate, name=name)
        arguments.check_same_scope(own_name, self._strategy, inner_optimizer)
        self.inner_optimizer = inner_optimizer
        self._set_untracked("_reduction", how)
        self._set_untracked("_reducer", reducer)
        self._set_untracked("_pending_weights", None)
        self._set_untracked("_given_group_assignment", group_assignment)
        # One value of each for a stack; see `StackPlan`.
        self._set_untracked("_given_settings", settings)
        self._check_stack()
        # Change the inner optimizers last, after every check that can raise.
        whole.make_local(inner_optimizer)

    def _check_stack(self) -> None:
        """Raises ValueError if the nested optimizers do not fit together."""
        stack.StackPlan(self)

    def _set_untracked(self, name: str, value: Any) -> None:
        """Sets an attribute that Keras and TensorFlow neither wrap nor save."""
        object.__setattr__(self, name, value)

    @property
    def _strategy(self) -> tf.distribute.Strategy:
        """The strategy in whose scope this optimizer was created."""
        return optimizer_state.strategy_of(self)

    # Attributes for users.

    @property
    def reduction(self) -> str:
        """The reduction, `"mean"` or `"sum"`."""
        return self._reduction.name

    @property
    def group_assignment(self) -> group_assignment_lib.GroupAssignment | None:
        """The groups as given; None for one group of all replicas.

        An AGNOptimizer without groups uses the groups of a wrapper around it.
        """
        return self._given_group_assignment

    @property
    def communication(self) -> communication_lib.Communication:
        """The settings for communicating gradients between replicas."""
        return self._reducer.communication

    @property
    def loss_normalization(self) -> str:
        """The normalization of the loss, one for a stack of wrappers.

        With `"global"`, the loss was divided by the number of replicas, as in
        Keras and TF2. With `"replica"`, it was not divided.
        """
        return stack.StackPlan(self).loss_normalization

    @property
    def skip_nonfinite(self) -> bool:
        """True if steps with nan or infinite gradients are skipped.

        All wrappers of a stack share this setting.
        """
        return stack.StackPlan(self).skip_nonfinite

    @property
    def skipped_steps(self) -> int:
        """The number of steps that this or an inner optimizer skipped."""
        return sum(
            int(one._skipped.numpy())
            for one in stack.wrappers(self)
            if one._skipped is not None
        )

    @property
    def _updating_optimizer(self) -> keras.optimizers.Optimizer:
        inner = self.inner_optimizer
        while isinstance(inner, keras.optimizers.LossScaleOptimizer):
            inner = inner.inner_optimizer
        return inner

    weight_decay = _forwarded("weight_decay")
    clipnorm = _forwarded("clipnorm")
    global_clipnorm = _forwarded("global_clipnorm")
    clipvalue = _forwarded("clipvalue")
    use_ema = _forwarded("use_ema")
    ema_momentum = _forwarded("ema_momentum")
    ema_overwrite_frequency = _forwarded("ema_overwrite_frequency")
    gradient_accumulation_steps = _forwarded("gradient_accumulation_steps")
    loss_scale_factor = _forwarded("loss_scale_factor")

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """An inner MultiOptimizer's optimizers; AttributeError for others."""
        return self._updating_optimizer.optimizers

    @property
    def variables(self) -> list[keras.Variable]:
        """This optimizer's variables, then the inner optimizer's."""
        return self._own_variables + self.inner_optimizer.variables

    @property
    def _own_variables(self) -> list[keras.Variable]:
        """The variables that this wrapper created."""
        return optimizer_state.own_variables(self)

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate; settable."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def iterations(self) -> Any:
        """The inner optimizer's number of updates."""
        return self.inner_optimizer.iterations

    def finalize_variable_values(self, var_list: Sequence) -> None:
        """Writes the inner optimizer's moving averages, if any, to the model.

        `fit` calls this at its end. An AGNOptimizer first exchanges, on all
        replicas, if steps are pending. Afterwards, the model holds the center.

        Args:
          var_list: The model's trainable variables.
        """
        plan = stack.StackPlan(self)
        plan.chain[-1]._finalize(var_list, plan)

    def _finalize(self, var_list: Sequence, plan: stack.StackPlan) -> None:
        """Finalizes as the last wrapper of a stack."""
        del plan
        self.inner_optimizer.finalize_variable_values(var_list)

    def exclude_from_weight_decay(
        self,
        var_list: Sequence | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Excludes variables from the inner optimizer's weight decay.

        Call it before the first step. It does not change traced functions.

        Args:
          var_list: Variables to exclude, or None.
          var_names: Strings, or None. Excludes variables whose name contains
            any of the strings.
        """
        self._updating_optimizer.exclude_from_weight_decay(var_list, var_names)

    @autograph.entry_point
    def scale_loss(self, loss: Any) -> Any:
        """Multiplies the loss by the inner optimizer's loss scale.

        Warns if `fit` calls this method with a loss that Keras has not divided
        by the number of replicas.

        Args:
          loss: A scalar tensor.

        Returns:
          The scaled loss, a scalar tensor.

        Raises:
          ValueError: If a TowerOptimizer is in the stack, and only some of the
            model's losses are a `GlobalMean`.

        Example:

        >>> inner = keras.optimizers.SGD(loss_scale_factor=8.0)
        >>> tf_xshard.CrossShardOptimizer(inner).scale_loss(2.0)
        16.0
        """
        plan = stack.StackPlan(self)
        num_replicas = self._strategy.num_replicas_in_sync
        if num_replicas > 1 and not self._has_checked_losses:
            self._has_checked_losses = True
            scalar_loss.warn_about_scalar_losses(num_replicas)
        for one in plan.chain:
            one._check_losses_of_fit()
        return plan.leaf.scale_loss(loss)

    def _check_losses_of_fit(self) -> None:
        """Raises ValueError if `fit` has losses that do not fit together."""

    # The training step.

    @autograph.entry_point
    def apply(
        self, grads: Sequence, trainable_variables: Sequence | None = None
    ) -> None:
        """Reduces and applies gradients, as the class describes.

        Call it in replica context, from `strategy.run` or without a strategy.

        Args:
          grads: A list of tensors, `tf.IndexedSlices` or None. An empty list
            does nothing.
          trainable_variables: The gradients' variables, in the same order. None
            (default) for the variables that `build` got.

        Raises:
          RuntimeError: In cross-replica context, if the optimizer was created
            in another strategy's scope, or in one of several processes that
            would train alone (see `connect`).
          ValueError: If gradients and variables do not match, no variable has
            a gradient, or the optimizer does not fit the strategy.

        Example:

        >>> optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(0.5))
        >>> weight = keras.Variable(1.0)
        >>> optimizer.apply([tf.constant(1.0)], [weight])
        >>> float(weight)
        0.5
        """
        grads = list(grads)
        if not grads:
            return
        site = self._checked_site()
        variables = self._checked_variables(grads, trainable_variables)
        with reduction_guard.lifted(), tf.name_scope(self.name):
            if any(isinstance(one, tf.IndexedSlices) for one in grads):
                whole.note_summed_rows(self.inner_optimizer)
            values = gradients_lib.standardized(grads, variables)
            self._step(
                gradients_lib.GradientBatch(values, variables),
                run_lib.begin(self, values, site),
            )

    def _note_restored(self, note: Callable[[], None]) -> None:
        """Calls a function that reads values from before the traced call."""
        # A Session's graph has no values yet.
        if tf.compat.v1.executing_eagerly_outside_functions():
            with tf.init_scope():
                note()

    def _counts(self) -> list[commit.Count]:
        """Returns this wrapper's counters that replicas must agree on."""
        return []

    def _step(
        self, batch: gradients_lib.GradientBatch, run: run_lib.Run
    ) -> None:
        """Takes this replica's gradients, and passes a batch to `run.then`."""
        raise NotImplementedError

    def _then(
        self,
        run: run_lib.Run,
        batch: gradients_lib.GradientBatch,
        finite: tf.Tensor | None,
        carry: reducer_lib.Carry,
        *,
        is_conditional: bool = True,
        update: Callable[[], Any] | None = None,
        writes: Sequence[Callable[[], Any]] = (),
    ) -> None:
        """Passes on a reduced batch, with the writes of its reduction.

        Args:
          run: The call.
          batch: The reduced gradients.
          finite: Whether all replicas take the step, or None for always.
          carry: The rounding errors, for error feedback.
          is_conditional: Whether the batch is applied only if `finite`.
          update: See `Run.then`.
          writes: See `Run.then`.
        """
        waits_for = [*batch.values, finite]
        remains: list[Callable[[], Any]] = []
        if self._error_feedback is not None:
            remains.append(
                functools.partial(self._error_feedback.keep, carry, finite)
            )
        if finite is not None and self._checks_finite(run):
            skip = self._skip_counter().noted(
                finite, run.plan.max_consecutive_skips, self.name
            )
            waits_for.append(skip.check)
            remains.append(skip.write)
        run.then(
            self,
            batch,
            update=update,
            finite=finite if is_conditional else None,
            waits_for=waits_for,
            writes=[*remains, *writes],
        )

    def _checks_finite(self, run: run_lib.Run) -> bool:
        """Returns whether this wrapper checks gradients and counts skips."""
        return run.plan.skip_nonfinite and run.plan.reduces(self)

    @autograph.entry_point
    def apply_gradients(self, grads_and_vars: Iterable[tuple]) -> Any:
        """Calls `apply` with (gradient, variable) pairs.

        Args:
          grads_and_vars: An iterable of (gradient, variable) pairs.

        Returns:
          `iterations` after the update.

        Raises:
          RuntimeError, ValueError: See `apply`.

        Example:

        >>> optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(0.5))
        >>> weight = keras.Variable(1.0)
        >>> int(optimizer.apply_gradients([(tf.constant(1.0), weight)]))
        1
        """
        grads, variables = [], []
        for grad, variable in grads_and_vars:
            grads.append(grad)
            variables.append(variable)
        self.apply(grads, variables)
        return self.iterations

    def _checked_variables(
        self, grads: Sequence, trainable_variables: Sequence | None
    ) -> list:
        """Returns the gradients' variables; builds the optimizer if needed."""
        if trainable_variables is None:
            if not self.built:
                raise ValueError(
                    f"{self.name} has not been built, so it does not know the"
                    " variables of these gradients. Pass them:"
                    " apply(grads, variables), or call build(variables) first."
                )
            variables = list(optimizer_state.trainable_variables(self))
        else:
            variables = list(trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(
                f"{self.name} got {len(grads)} gradients for"
                f" {len(variables)} variables. Pass one gradient for each"
                " variable, or None where there is no gradient."
            )
        if not self.built:
            self.build(variables)
        for one in stack.chain(self):
            unknown = optimizer_state.unknown_to(one, variables)
            if unknown:
                raise ValueError(
                    f"Unknown variable: {unknown[0]!r}. {one.name} was built"
                    " with other variables, and has no state for it. Create"
                    " another optimizer, and build it with all variables:"
                    " optimizer.build(variables)."
                )
        return variables

    def _checked_site(self) -> site_lib.Site:
        """Returns where a step runs, under this optimizer's strategy."""
        own = self._strategy
        if own.num_replicas_in_sync > 1 and not tf.distribute.has_strategy():
            # One call would move the state of the first replica only.
            raise RuntimeError(
                f"{self.name} was created in the scope of"
                f" {type(own).__name__} but is applied outside of it, where"
                " there are no replicas. Nothing was changed. Apply gradients"
                " inside strategy.run()."
            )
        site = site_lib.current()
        self._check_strategy(site.strategy)
        lone_training.refuse(site.strategy, f"{self.name} applies gradients")
        return site

    def _check_strategy(self, strategy: tf.distribute.Strategy) -> None:
        own = self._strategy
        # Outside any scope, Keras can write to all copies of a variable.
        if strategy is own or not tf.distribute.has_strategy():
            return
        raise RuntimeError(
            f"{self.name} was created"
            f" {site_lib.other_scope(own)} but is used under"
            f" {type(strategy).__name__}. Create the model, the inner optimizer"
            f" and {type(self).__name__} inside `with strategy.scope():` of the"
            " strategy that trains them."
        )

    # Building.

    @autograph.entry_point
    def build(self, variables: Sequence) -> None:
        """Creates this optimizer's and the inner optimizer's variables.

        Args:
          variables: The list of variables to train.

        Raises:
          RuntimeError: If the optimizer was created in another strategy's
            scope.
          ValueError: If a LossScaleOptimizer wraps the optimizer on several
            replicas. If a LossScaleOptimizer is inside and another
            LossScaleOptimizer or a MultiOptimizer wraps the optimizer.

        Example:

        >>> optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.Adam())
        >>> optimizer.build([keras.Variable(1.0)])
        >>> optimizer.inner_optimizer.built
        True
        """
        plan = stack.StackPlan(self)
        self._refuse_loss_scale_optimizer_above()
        self._refuse_multi_optimizer_above(plan)
        variables = list(variables)
        # Keras's loader of legacy .h5 files passes the model's own variables
        # without its layers' variables, so `variables` is empty. The weights
        # that the loader sets next must wait.
        if self.built or not variables:
            return
        if tf.distribute.has_strategy():
            self._check_strategy(tf.distribute.get_strategy())
        with self._creating_variables():
            self._build(variables, plan)

    def _build(self, variables: list, plan: stack.StackPlan) -> None:
        arguments.refuse_aggregation(self.name, self._strategy, variables)
        with (
            local_optimizers.tracked(),
            keras_shards.building(),
            keras_shards.choosing(
                stack.with_local_optimizers(self), self._make_chosen_local
            ),
        ):
            self._create_state(variables, plan)
            if plan.skip_nonfinite and plan.reduces(self):
                self._skip_counter()
        # Include optimizers that a MultiOptimizer has just created.
        whole.make_local(self.inner_optimizer)
        self._check_stack()
        if self._pending_weights is not None:
            self._create_saved(self._pending_weights)
            self._check_weights(self._pending_weights)
        # Set `built` last, after every check that can raise.
        optimizer_state.set_trainable_variables(self, variables)
        # Keras keeps a MultiOptimizer's optimizers in a list that
        # tf.train.Checkpoint does not follow, so track them here.
        for index, one in enumerate(_in_checkpoint_order(self)):
            if hasattr(one, "inner_optimizer"):
                continue
            for position, leaf in enumerate(stack.children(one)):
                optimizer_state.track(
                    self, leaf, f"optimizer_{index}_{position}"
                )
        self._warn_of_fresh_parts()
        if self._pending_weights is not None:
            pending = self._pending_weights
            self._set_untracked("_pending_weights", None)
            self.set_weights(pending)

    def _make_chosen_local(self, multi_optimizer: Any, chosen: Any) -> None:
        """Changes an optimizer that a MultiOptimizer inside has chosen."""
        if inside := stack.wrappers(chosen):
            stack.refuse_between(self, multi_optimizer, inside[0])
        whole.make_local(chosen)

    def _create_state(self, variables: list, plan: stack.StackPlan) -> None:
        """Creates this optimizer's variables; builds the inner optimizer."""
        inner = self.inner_optimizer
        with self._named():
            if not inner.built and stack.is_wrapper(inner):
                inner._build(variables, plan)
            elif not inner.built:
                inner.build(variables)
            self._create_residuals(variables)

    def _create_residuals(self, variables: list) -> None:
        """Creates the variables of error feedback, if it is on."""
        if self.has_own_reducer and self.communication.error_feedback:
            residuals = error_feedback.Residuals(
                [v for v in variables if self._has_residual(v)]
            )
            self._set_untracked("_error_feedback", residuals)
            # Checkpoints store the variables under this name.
            self._residuals = residuals.variables

    @contextlib.contextmanager
    def _creating_variables(self) -> Iterator[None]:
        """Opens a context in which a step can create variables."""
        if not tf.executing_eagerly():
            tracing.initialize_new_variables()
        # A tf.function that runs more than once can't create variables.
        with tf.init_scope(), site_lib.scope_of(self._strategy):
            yield

    def _has_residual(self, variable: Any) -> bool:
        return variable_role.role_of(variable).has_loss_gradient

    def _num_skipped_here(self) -> tf.Tensor:
        """Returns this replica's number of skipped steps."""
        return replica_variables.read(self._skip_counter().total)

    def _skip_counter(self) -> skipping.SkipCounter:
        # An outer optimizer may have asked for it after this one was built.
        if self._counter is None:
            with self._creating_variables(), self._named():
                counter = skipping.SkipCounter()
            self._set_untracked("_counter", counter)
            # Checkpoints store the variables under these names.
            self._skipped = counter.total
            self._skips_in_a_row = counter.in_a_row
        assert self._counter is not None
        return self._counter

    def _named(self) -> contextlib.AbstractContextManager:
        """Returns a name scope of this optimizer, for new variables."""
        return keras.name_scope(self.name, caller=self)

    def _refuse_loss_scale_optimizer_above(self) -> None:
        has_caller_of = optimizer_state.has_caller_of
        # A MultiOptimizer lists an optimizer only after building it. So assume
        # that any MultiOptimizer that is building contains this wrapper.
        if stack.has_loss_scale_optimizer(self) and has_caller_of(
            keras.optimizers.Optimizer, stack.is_multi_optimizer
        ):
            raise ValueError(
                f"{self.name} has a LossScaleOptimizer inside and is itself"
                " inside a MultiOptimizer, which would not scale the loss, so"
                " the updates would be much too small. Put the"
                " LossScaleOptimizer around the MultiOptimizer: tf_xshard."
                "CrossShardOptimizer(keras.optimizers.LossScaleOptimizer("
                "keras.optimizers.MultiOptimizer(...)))."
            )
        # On one replica, a LossScaleOptimizer around this wrapper sees all
        # gradients, so raise only if a second one inside also scales the loss.
        if (
            self._strategy.num_replicas_in_sync == 1
            and not stack.has_loss_scale_optimizer(self.inner_optimizer)
        ):
            return
        if has_caller_of(
            keras.optimizers.LossScaleOptimizer,
            lambda one: any(inner is self for inner in stack.descendants(one)),
        ):
            raise ValueError(self._loss_scale_error())

    def _refuse_multi_optimizer_above(self, plan: stack.StackPlan) -> None:
        if plan.skip_nonfinite and optimizer_state.has_caller_of(
            keras.optimizers.Optimizer, stack.is_multi_optimizer
        ):
            raise ValueError(
                f"{self.name} has skip_nonfinite=True and is inside a"
                " MultiOptimizer, whose other optimizers would not skip. Put"
                f" {self.name} around the MultiOptimizer."
            )

    def _loss_scale_error(self) -> str:
        name = type(self).__name__
        num_replicas = self._strategy.num_replicas_in_sync
        why = (
            "Another LossScaleOptimizer is inside, and both scale the loss."
            if stack.has_loss_scale_optimizer(self.inner_optimizer)
            else (
                "It checks only the gradients of replica 0, not of all"
                f" {num_replicas} replicas, so an overflow on another replica"
                " would reach the weights."
            )
        )
        remedy = (
            f"Instead, write {name}(keras.optimizers.LossScaleOptimizer(inner))"
            " and"
            if self._supports_loss_scaling
            else (
                f"{name} does not support loss scaling: use the dtype policy"
                " mixed_bfloat16, which needs no loss scaling, or"
            )
        )
        return (
            f"A LossScaleOptimizer wraps {name}. {why} (Under the dtype policy"
            " mixed_float16, model.compile() adds a LossScaleOptimizer"
            " automatically.)"
            f" {remedy} model.compile(..., auto_scale_loss=False)."
        )

    # Saving and loading.

    def set_weights(self, weights: Sequence) -> None:
        """Sets the values of `variables`, including the inner optimizer's.

        Before `build`, the values are kept until `build` sets them.

        Args:
          weights: One array per variable, in the order of `variables`.

        Raises:
          ValueError: If the number of arrays or a shape differs. In that case,
            nothing is changed.
        """
        # Copy the weights, because a loader closes its file before `build`.
        weights = [np.array(weight) for weight in weights]
        if not self.built:
            self._set_untracked("_pending_weights", weights)
            return
        self._create_saved(weights)
        self._check_weights(weights)
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def _create_saved(self, weights: Sequence[np.ndarray]) -> None:
        """Creates variables that only steps create, if `weights` has them."""
        position = 0
        for one in stack.wrappers(self):
            position += len(one._own_variables)
            if len(weights) == len(self.variables) + 1:
                value = weights[position]
                if not value.shape and value.dtype.kind == "f":
                    one._create_optional()

    def _check_weights(self, weights: Sequence[np.ndarray]) -> None:
        variables = self.variables
        if len(weights) != len(variables):
            raise ValueError(
                f"{self.name} has {len(variables)} variables, got"
                f" {len(weights)} weights. Was it saved with another inner"
                " optimizer? Nothing was changed."
            )
        for variable, weight in zip(variables, weights, strict=True):
            if tuple(variable.shape) != weight.shape:
                raise ValueError(
                    f"{self.name}: variable {variable.path!r} has shape"
                    f" {tuple(variable.shape)}, got a weight of shape"
                    f" {weight.shape}. Nothing was changed."
                )

    def save_own_variables(self, store: Any) -> None:
        """Saves the state at this optimizer's path in a Keras file.

        Warns once if replicas differ, since only replica 0's values are saved.

        Args:
          store: A dict-like object, from Keras.
        """
        self._own_part.warn()
        if not keras_saving.saves_something_else(self, store):
            saving_lib.save(self, store)

    def load_own_variables(self, store: Any) -> None:
        """Loads the state of this optimizer and of the optimizers inside.

        The file may come from other wrappers or from plain Keras. Warns about
        optimizers that start without saved state, and about state that fits no
        optimizer.

        Args:
          store: A dict-like object, from Keras.
        """
        if not keras_saving.skips_this_load(self, store):
            saving_lib.load(self, store)

    def _checkpointed_as(self) -> Any:
        return saving_lib.inside(self)

    def _completed(self, values: Sequence) -> Sequence:
        """Completes saved values of `_own_variables`, in their order.

        Optional variables (`saving.OPTIONAL`) come last. They may have been
        saved or not, and are matched by their kind of number, with 0 for those
        that were not saved.
        """
        num_required = len(self._required_variables)
        extra = [np.asarray(one) for one in values[num_required:]]
        counts = [one for one in extra if one.dtype == np.int64]
        numbers = [one for one in extra if one.dtype.kind == "f"]
        is_known = len(counts) in (0, 2) and len(counts) + len(numbers) == len(
            extra
        )
        if not is_known or any(one.shape for one in extra):
            return values
        if numbers:
            self._create_optional()
        result = list(values[:num_required])
        for variable in self._own_variables[num_required:]:
            dtype = np.dtype(variable.dtype)
            saved = counts if dtype == np.int64 else numbers
            result.append(saved.pop(0) if saved else np.zeros((), dtype))
        return result

    def _create_optional(self) -> None:
        """Creates the variable that only a step creates, if there is one."""

    @property
    def _required_variables(self) -> list[keras.Variable]:
        """The variables that this wrapper created, without optional ones."""
        return [
            one
            for one in self._own_variables
            if not saving_lib.is_optional(one.path)
        ]

    def _unsaved_state(self) -> str | None:
        """Describes state that Keras and TensorFlow may not save, or None."""
        return None

    def _lost_now(self) -> str | None:
        """Describes state that a save would lose now, or returns None."""
        lost = self._unsaved_state()
        variables = [
            *optimizer_state.trainable_variables(self),
            *self.variables,
        ]
        if lost and self.built and replica_variables.may_differ(variables):
            return lost
        return None

    def get_config(self) -> dict:
        """Returns the arguments, for serialization."""
        self._own_part.warn_in_legacy_save()
        return {
            "inner_optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
            **self._given_settings,
            "name": self.name,
        }

    def _reducer_config(self) -> dict:
        """Returns the arguments of this optimizer's own reducer."""
        groups = self._given_group_assignment
        return {
            "reduction": self.reduction,
            "group_assignment": groups and groups.to_list(),
            "communication": self.communication.get_config(),
        }

    @classmethod
    def from_config(
        cls, config: dict, custom_objects: Mapping | None = None
    ) -> GradientWrapper:
        """Creates an optimizer from the dict of `get_config`.

        Args:
          config: The dict, which is not changed.
          custom_objects: A dict from names to objects that Keras does not know.

        Returns:
          An optimizer without state.
        """
        # Copy the dict, since LossScaleOptimizer.from_config pops from it.
        config = copy.deepcopy(config)
        if isinstance(config.get("communication"), dict):
            config["communication"] = communication_lib.Communication(
                **config["communication"]
            )
        return cls(
            **{
                key: keras.saving.deserialize_keras_object(
                    value, custom_objects=custom_objects
                )
                if isinstance(value, dict) and "class_name" in value
                else value
                for key, value in config.items()
            }
        )

    # Other folders call these methods.

    def counts_of_stack(self) -> list[commit.Count]:
        """Returns the counters that replicas must agree on, of all wrappers."""
        return [
            *(one for w in stack.wrappers(self) for one in w._counts()),
            *(
                commit.Count(
                    f"{one.name}.iterations", optimizer_state.counter(one)
                )
                for one in stack.descendants(self)
                if not any(stack.children(one))
            ),
        ]

    def forgetting_traces(self) -> contextlib.AbstractContextManager:
        """Opens a context in which tracing a step leaves no record here."""
        return contextlib.nullcontext()

    def _kinds_of_state(self) -> dict[int, str]:
        """Maps ids of variables to kinds that `GroupState` can't infer."""
        return {}

    def _centers_by_variable(self) -> dict[int, Any]:
        """Maps ids of the model's variables to centers to use instead."""
        return {}


def _in_checkpoint_order(optimizer: Any) -> list[keras.optimizers.Optimizer]:
    """Returns a stack's optimizers, with AGNOptimizer's local ones last."""
    local = getattr(optimizer, "local_optimizer", None)
    below = [] if local is None else list(stack.descendants(local))
    return [*stack.descendants(optimizer), *below]


def _no_learning_rate() -> float:
    return 0.0
