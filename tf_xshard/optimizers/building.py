"""How a wrapper is built, in the scope of one strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.distribute import site as site_lib
from tf_xshard.optimizers import inner_update
from tf_xshard.optimizers import loss_conventions
from tf_xshard.optimizers import stack
from tf_xshard.optimizers import tree
from tf_xshard.optimizers import wrapper_arguments
from tf_xshard.private import keras_optimizer_state
from tf_xshard.private import keras_optimizers
from tf_xshard.private import keras_shards
from tf_xshard.private import tensorflow as private_tensorflow


class Building(loss_conventions.LossConventions):
    """The part of a wrapper that creates variables, and checks for which."""

    _pending_weights: list | None

    @property
    def _strategy(self) -> tf.distribute.Strategy:
        """The strategy in whose scope this optimizer was made."""
        return keras_optimizer_state.strategy_of(self)

    def _checked_variables(
        self, grads: Sequence, trainable_variables: Sequence | None
    ) -> list:
        if trainable_variables is None:
            if not self.built:
                raise ValueError(
                    f"{self.name} has not been built, so it does not know the"
                    " variables of these gradients. Pass them:"
                    " apply(grads, variables), or call build(variables) first."
                )
            variables = list(keras_optimizer_state.trainable_variables(self))
        else:
            variables = list(trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(
                f"{self.name} got {len(grads)} gradients for"
                f" {len(variables)} variables. Pass one for each, None where"
                " there is no gradient."
            )
        if not self.built:
            if not tf.executing_eagerly():
                private_tensorflow.initialize_new_variables()
            # Variables can't be created inside a tf.function that runs more
            # than once; init_scope exits it, and the strategy's scope too.
            with tf.init_scope():
                self.build(variables)
        keras_optimizer_state.check_variables_are_known(self, variables)
        return variables

    @private_tensorflow.entry_point
    def build(self, variables: Sequence) -> None:
        """Creates the variables of this optimizer and of the inner one.

        Args:
          variables: The list of variables that will be trained.

        Raises:
          RuntimeError: If it was created in another strategy's scope.
          ValueError: If a LossScaleOptimizer wraps it on several replicas, or
            a MultiOptimizer wraps it while a LossScaleOptimizer is inside.

        Example:

        >>> optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.Adam())
        >>> optimizer.build([keras.Variable(1.0)])
        >>> optimizer.inner_optimizer.built
        True
        """
        with stack.call_of(self):
            self._refuse_loss_scale_optimizer_above()
            variables = list(variables)
            # Keras' loader of legacy .h5 files builds with the model's own
            # variables, without its layers': none. What it then sets has to
            # wait.
            if self.built or not variables:
                return
            if tf.distribute.has_strategy():
                self._check_strategy(tf.distribute.get_strategy())
                self._build(variables)
            else:
                with self._strategy.scope():
                    self._build(variables)

    def _build(self, variables: list) -> None:
        with (
            keras_optimizers.tracked(),
            keras.name_scope(self.name, caller=self),
            keras_shards.building(),
            inner_update.changing_when_chosen(self, inner_update.make_local),
        ):
            self._build_inner(variables)
            self._build_residuals(variables)
        # A MultiOptimizer may have created optimizers.
        inner_update.make_local(self.inner_optimizer)
        stack.settle_again(self)
        self._check_stack()
        if self._pending_weights is not None:
            self._check_weights(self._pending_weights)
        # Last, when nothing can be refused any more.
        keras_optimizer_state.set_trainable_variables(self, variables)
        # Keras keeps a MultiOptimizer's optimizers in a list that
        # tf.train.Checkpoint does not follow, so track them here.
        for index, one in enumerate(_own_tree(self)):
            if hasattr(one, "inner_optimizer"):
                continue
            for position, leaf in enumerate(tree.children(one)):
                keras_optimizer_state.track(
                    self, leaf, f"optimizer_{index}_{position}"
                )
        self._warn_of_fresh_parts()
        if self._pending_weights is not None:
            pending = self._pending_weights
            self._set_untracked("_pending_weights", None)
            self.set_weights(pending)

    def _warn_of_fresh_parts(self) -> None:
        raise NotImplementedError

    def _check_stack(self) -> None:
        """Checks what only the optimizers inside show, once built.

        Raises:
          ValueError: If they do not fit.
        """
        self._resolved_loss_normalization()
        # For others the constructor has checked it.
        if self._reducer.role == "stand_in" and tree.wrappers(
            self.inner_optimizer
        ):
            wrapper_arguments.refuse_partial_reduction(self.inner_optimizer)

    def _build_residuals(self, variables: list) -> None:
        raise NotImplementedError

    def _build_inner(self, variables: list) -> None:
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)

    def _check_strategy(self, strategy: tf.distribute.Strategy) -> None:
        own = self._strategy
        # Outside any scope Keras writes to all copies; that works.
        if strategy is own or not tf.distribute.has_strategy():
            return
        raise RuntimeError(
            f"{self.name} was created"
            f" {site_lib.other_scope(own)} but is used under"
            f" {type(strategy).__name__}. Create the model, the inner optimizer"
            f" and {type(self).__name__} inside `with strategy.scope():` of the"
            " strategy that trains them."
        )


def _own_tree(optimizer: Any) -> list[keras.optimizers.Optimizer]:
    """Optimizers in checkpoint order: AGNOptimizer's local ones come last."""
    local = getattr(optimizer, "local_optimizer", None)
    below = [] if local is None else list(tree.descendants(local))
    return [*tree.descendants(optimizer), *below]
