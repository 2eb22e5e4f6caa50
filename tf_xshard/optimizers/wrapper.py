"""What all Keras wrappers of this package have in common.

They build, configure, and refuse by name what can't be honoured; `delegation`
has what they forward.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import reduction_guard
from tf_xshard.distribute import site as site_lib
from tf_xshard.optimizers import inner_update
from tf_xshard.optimizers import save_warning
from tf_xshard.optimizers import saved_state
from tf_xshard.optimizers import stack
from tf_xshard.optimizers import wrapper_arguments
from tf_xshard.private import tensorflow as private_tensorflow
from tf_xshard.reduction import group_sum
from tf_xshard.reduction import residuals as residuals_lib


class OptimizerWrapper(saved_state.Saved):
    """Base class of the optimizers that pass reduced gradients to another.

    Subclasses override `_step` and `get_config`. Everything set on the inner
    optimizer acts on the gradients that `_step` passes to it.

    Args:
      inner_optimizer: A Keras optimizer, created in the same strategy scope.
      reduction: `"mean"` or `"sum"`.
      reducer: Reduces gradients; this wrapper's, or that of a wrapper inside.
      loss_normalization: `"global"`, `"replica"` or None.
      name: The optimizer's name.
      **kwargs: Arguments of the base class, to refuse them by name.

    Raises:
      TypeError: If `inner_optimizer` is not a Keras optimizer, or reduces by
        itself, or a keyword is unknown.
      ValueError: For an argument that belongs on the inner optimizer,
        conflicting `loss_normalization` in one stack, or another strategy's
        scope.
    """

    is_tf_xshard_wrapper = True
    # Whether `_reducer` is this wrapper's, not one inside.
    has_own_reducer = True

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        *,
        reduction: str,
        reducer: group_sum.GroupReducer,
        loss_normalization: str | None,
        name: str,
        **kwargs: Any,
    ) -> None:
        reduction = wrapper_arguments.check(
            type(self).__name__,
            inner_optimizer,
            reduction,
            loss_normalization,
            kwargs,
        )
        site_lib.check_devices(tf.distribute.get_strategy())
        self._set_untracked(
            "_own_part",
            save_warning.LossySaveWarning(
                name, self._lost_now, self._own_children
            ),
        )
        # A callable avoids a learning rate variable, which would be saved but
        # never used.
        super().__init__(learning_rate=_no_learning_rate, name=name)
        wrapper_arguments.check_same_scope(
            type(self).__name__, self._strategy, inner_optimizer
        )
        self.inner_optimizer = inner_optimizer
        self._reduction = reduction
        self._loss_normalization = loss_normalization
        self._set_untracked("_reducer", reducer)
        self._set_untracked("_pending_weights", None)
        self._resolved_loss_normalization()
        # Change the inner optimizers last, when nothing can be refused any
        # more.
        inner_update.make_local(inner_optimizer)
        stack.settle(self)

    @property
    def reduction(self) -> str:
        """`"mean"` or `"sum"`."""
        return self._reduction

    @property
    def group_assignment(self) -> group_assignment_lib.GroupAssignment | None:
        """The groups, or None for one group of all replicas."""
        return self._reducer.group_assignment

    @property
    def communication(self) -> communication_lib.Communication:
        """How gradients are communicated between replicas."""
        return self._reducer.communication

    # The training step.

    def _take(self, place: stack.Place) -> None:
        """Takes a place in the stack of optimizers that is used."""
        self._set_untracked("_is_outermost", place.is_outermost)
        if self.has_own_reducer:
            self._reducer.group_assignment = place.group_assignment
            self._reducer.is_redundant = place.is_redundant

    @private_tensorflow.entry_point
    def apply(
        self, grads: Sequence, trainable_variables: Sequence | None = None
    ) -> None:
        """Reduces gradients as the class describes and applies them.

        Call it in replica context: from `strategy.run`, or with no strategy.

        Args:
          grads: A list of gradients: tensors, `tf.IndexedSlices` or None. An
            empty list does nothing.
          trainable_variables: The variables they belong to, in the same order.
            None (default) for those that the optimizer was built with.

        Raises:
          RuntimeError: In cross-replica context, or if the optimizer was
            created in another strategy's scope.
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
        with stack.call_of(self), reduction_guard.lifted():
            variables = self._checked_variables(grads, trainable_variables)
            site = site_lib.current()
            self._check_strategy(site.strategy)
            if any(isinstance(one, tf.IndexedSlices) for one in grads):
                inner_update.note_summed_rows(self.inner_optimizer)
            with tf.name_scope(self.name):
                self._step(grads, variables, site)

    def _step(
        self, gradients: list, variables: list, site: site_lib.Site
    ) -> None:
        """Applies this replica's gradients: each is a tensor, IndexedSlices or
        None for the variable at its position."""
        raise NotImplementedError

    @private_tensorflow.entry_point
    def apply_gradients(self, grads_and_vars: Iterable[tuple]) -> Any:
        """`apply` for (gradient, variable) pairs.

        Args:
          grads_and_vars: An iterable of (gradient, variable) pairs.

        Returns:
          `iterations`, after the update.

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

    def _build_residuals(self, variables: list) -> None:
        if not (self.has_own_reducer and self.communication.error_feedback):
            return
        residuals = residuals_lib.Residuals(
            [v for v in variables if not inner_update.is_overwritten(v)]
        )
        # Checkpoints store the variables under this name.
        self._residuals = residuals.variables
        self._reducer.residuals = residuals

    # Queried by communication_plan.

    def forgetting_traces(self) -> contextlib.AbstractContextManager:
        """A context in which tracing a step leaves no trace in this object."""
        return contextlib.nullcontext()

    # Queried by GroupState.

    def _kinds_of_state(self) -> dict[int, str]:
        """Kinds of `StateVariable` that only this optimizer knows.

        Returns:
          Kinds by the ids of TensorFlow's variables.
        """
        return {}

    def _centers_by_variable(self) -> dict[int, Any]:
        """The variables that hold a group's values instead of the model's.

        Returns:
          Variables, by the ids of the model's variables.
        """
        return {}

    # Configuration.

    def get_config(self) -> dict:
        """The arguments, for serialization."""
        self._own_part.warn_in_legacy_save()
        return {
            "inner_optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
            "loss_normalization": self._loss_normalization,
            "name": self.name,
        }

    def _reducer_config(self) -> dict:
        """The arguments of this optimizer's own reducer."""
        groups = self.group_assignment
        return {
            "reduction": self._reduction,
            "group_assignment": groups and groups.to_list(),
            "communication": self.communication.get_config(),
        }

    @classmethod
    def from_config(
        cls, config: dict, custom_objects: Mapping | None = None
    ) -> OptimizerWrapper:
        """Makes an optimizer from `get_config`'s dict, which is not changed.

        Args:
          config: A dict.
          custom_objects: A dict from names to objects that Keras does not know.

        Returns:
          An optimizer with no state.
        """
        # LossScaleOptimizer.from_config pops from the dict it is given.
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


def _no_learning_rate() -> float:
    return 0.0
