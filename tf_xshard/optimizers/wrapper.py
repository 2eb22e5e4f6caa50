"""What every Keras wrapper of this package does around its own decision.

It builds, configures, and refuses by name what can't be honoured; `delegation`
has what it forwards.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard.distribute import replica_context
from tf_xshard.distribute import replica_variables
from tf_xshard.optimizers import delegation
from tf_xshard.optimizers import inner_update
from tf_xshard.optimizers import save_warning
from tf_xshard.optimizers import tree
from tf_xshard.private import keras_optimizers
from tf_xshard.private import tensorflow as private_tensorflow

LOSS_NORMALIZATIONS = ("global", "replica")


class OptimizerWrapper(delegation.Delegation):
    """Base class of the optimizers that hand reduced gradients to another.

    Subclasses override `_step` and `get_config`. All that is set on the inner
    optimizer acts on the gradients that `_step` hands over.

    Args:
      inner_optimizer: A Keras optimizer, made in the same strategy scope.
      loss_normalization: `"global"`, `"replica"` or None.
      name: The optimizer's name.
      **kwargs: Arguments of the base class, to refuse them by name.

    Raises:
      TypeError: If `inner_optimizer` is no Keras optimizer, or reduces by
        itself, or a keyword is not known.
      ValueError: For an argument that belongs on the inner optimizer, two
        different `loss_normalization` in one stack, or another strategy's
        scope.
    """

    is_tf_xshard_wrapper = True

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        *,
        loss_normalization: str | None,
        name: str,
        **kwargs: Any,
    ):
        own_name = type(self).__name__
        _refuse_base_arguments(own_name, kwargs)
        _check_inner(own_name, inner_optimizer)
        if loss_normalization not in (None, *LOSS_NORMALIZATIONS):
            raise ValueError(
                f"loss_normalization must be one of {LOSS_NORMALIZATIONS} or"
                f" None, got {loss_normalization!r}."
            )
        replica_context.kind_of(tf.distribute.get_strategy())
        # A callable makes no learning rate variable, which would be saved and
        # never used.
        super().__init__(learning_rate=_no_learning_rate, name=name)
        if inner_optimizer._distribution_strategy is not (
            self._distribution_strategy
        ):
            raise ValueError(
                f"{own_name} is made in the scope of"
                f" {type(self._distribution_strategy).__name__} and its inner"
                f" optimizer {inner_optimizer.name!r} in that of"
                f" {type(inner_optimizer._distribution_strategy).__name__}."
                " Make both inside the same `with strategy.scope():`."
            )
        self.inner_optimizer = inner_optimizer
        self._loss_normalization = loss_normalization
        self._set_untracked("_pending_weights", None)
        notice = save_warning.NoticeOfSaving(name, self._lost_by_a_save)
        self._set_untracked("_notice_of_saving", notice)
        self._track_trackable(notice, "notice_of_saving")
        self._is_outermost = True
        self._resolved_loss_normalization()
        # The inner optimizers change last, when nothing can be refused any
        # more.
        inner_update.make_local(inner_optimizer)
        for inner in self._inner_wrappers():
            inner._is_outermost = False

    # What a step does.

    @private_tensorflow.entry_point
    def apply(self, grads: Sequence, trainable_variables=None) -> None:
        """Reduces gradients as the class says and applies them.

        Call it in replica context: from `strategy.run`, or with no strategy.

        Args:
          grads: A list of gradients: tensors, `tf.IndexedSlices` or None. An
            empty list does nothing.
          trainable_variables: The variables they belong to, in the same order.
            None (default) for those that the optimizer was built with.

        Raises:
          RuntimeError: In cross-replica context, or where the optimizer was
            made in another strategy's scope.
          ValueError: If gradients and variables do not match, if no variable
            has a gradient, or if the optimizer does not fit the strategy.

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
        variables = self._prepare(grads, trainable_variables)
        here = replica_context.current()
        self._check_strategy(here.strategy)
        with tf.name_scope(self.name):
            self._step(grads, variables, here)

    def _step(self, gradients, variables, here: replica_context.Here) -> None:
        raise NotImplementedError

    @private_tensorflow.entry_point
    def apply_gradients(self, grads_and_vars):
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

    def _prepare(self, grads, trainable_variables) -> list:
        if trainable_variables is None:
            if not self.built:
                raise ValueError(
                    f"{self.name} has not been built, so it does not know the"
                    " variables of these gradients. Pass them:"
                    " apply(grads, variables), or call build(variables) first."
                )
            variables = list(self._trainable_variables)
        else:
            variables = list(trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(
                f"{self.name} got {len(grads)} gradients for"
                f" {len(variables)} variables. Pass one for each, None where"
                " there is no gradient."
            )
        if not self.built:
            # Variables can't be made inside a tf.function that runs more than
            # once; init_scope leaves it, and the strategy's scope with it.
            with tf.init_scope():
                self.build(variables)
        self._check_variables_are_known(variables)
        return variables

    # Building.

    @private_tensorflow.entry_point
    def build(self, variables) -> None:
        """Makes the variables of this optimizer and of the inner one.

        Args:
          variables: The list of variables that will be trained.

        Raises:
          RuntimeError: If the optimizer was made in another strategy's scope.
          ValueError: If a LossScaleOptimizer is around this optimizer under
            several replicas.

        Example:

        >>> optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.Adam())
        >>> optimizer.build([keras.Variable(1.0)])
        >>> optimizer.inner_optimizer.built
        True
        """
        self._refuse_outer_loss_scale()
        variables = list(variables)
        # Keras' loader of legacy .h5 files builds with the variables of the
        # model itself, without its layers': none. What it sets then has to
        # wait.
        if self.built or not variables:
            return
        strategy = self._distribution_strategy
        if tf.distribute.has_strategy():
            self._check_strategy(tf.distribute.get_strategy())
            self._build(variables)
        else:
            with strategy.scope():
                self._build(variables)

    def _build(self, variables) -> None:
        with keras.name_scope(self.name, caller=self):
            self._build_inner(variables)
        # Not the base class' build: with `use_ema` and the like forwarded, it
        # would make the inner optimizer's variables a second time.
        for index, variable in enumerate(variables):
            self._trainable_variables_indices[self._var_key(variable)] = index
        with keras_optimizers.untracked():
            self._trainable_variables = variables
        self.built = True
        inner_update.make_local(self.inner_optimizer)
        # Keras keeps a MultiOptimizer's optimizers in a list that
        # tf.train.Checkpoint does not follow; here it finds them.
        for index, one in enumerate(self._all_optimizers()):
            if hasattr(one, "inner_optimizer"):
                continue
            for position, leaf in enumerate(tree.children(one)):
                self._track_trackable(
                    leaf, f"optimizer_{index}_{position}", overwrite=True
                )
        if self._pending_weights is not None:
            pending = self._pending_weights
            self._set_untracked("_pending_weights", None)
            self.set_weights(pending)

    def _all_optimizers(self) -> list[keras.optimizers.Optimizer]:
        return list(tree.descendants(self))

    def _build_inner(self, variables) -> None:
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)

    def _check_strategy(self, strategy) -> None:
        own = self._distribution_strategy
        # Outside any scope Keras writes through to all copies; that works.
        if strategy is own or not tf.distribute.has_strategy():
            return
        raise RuntimeError(
            f"{self.name} was made"
            f" {_scope_name(own)} and is used under"
            f" {type(strategy).__name__}. Make the model, the inner optimizer"
            f" and {type(self).__name__} inside `with strategy.scope():` of the"
            " strategy that trains them."
        )

    def _refuse_outer_loss_scale(self) -> None:
        num_replicas = self._distribution_strategy.num_replicas_in_sync
        has_own = tree.has_loss_scale_optimizer(self.inner_optimizer)
        if not self._is_outermost or (num_replicas == 1 and not has_own):
            return
        # Keras tells an inner optimizer nothing about what is around it, except
        # by calling build: LossScaleOptimizer.build calls the inner one's.
        frame = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, keras.optimizers.LossScaleOptimizer) and any(
                one is self for one in tree.descendants(caller)
            ):
                break
            frame = frame.f_back
        else:
            return
        name = type(self).__name__
        why = (
            "There is another inside, and both scale the loss."
            if has_own
            else (
                f"It decides on replica 0's gradients alone, of {num_replicas},"
                " so an overflow on another replica would reach the weights."
            )
        )
        raise ValueError(
            f"A LossScaleOptimizer is around {name}. {why} Write"
            f" {name}(keras.optimizers.LossScaleOptimizer(inner)) and"
            " model.compile(..., auto_scale_loss=False)."
        )

    # How losses are normalized.

    @property
    def loss_normalization(self) -> str:
        """What the gradients that arrive were divided by.

        `"global"`: by the number of replicas, as Keras and TF2 do. `"replica"`:
        by nothing. One setting holds for a stack of wrappers.
        """
        return self._resolved_loss_normalization()

    def _inner_wrappers(self) -> list[OptimizerWrapper]:
        return [
            one
            for one in tree.descendants(self.inner_optimizer)
            if tree.is_wrapper(one)
        ]

    def _resolved_loss_normalization(self) -> str:
        stack = [self, *self._inner_wrappers()]
        given = {
            one._loss_normalization
            for one in stack
            if one._loss_normalization is not None
        }
        if len(given) > 1:
            raise ValueError(
                "A stack of tf_xshard optimizers has one loss_normalization,"
                f" got {sorted(given)} in"
                f" {[one.name for one in stack]}. Give it to one of them."
            )
        return given.pop() if given else "global"

    def _arriving_divisor(self, here: replica_context.Here) -> int:
        """What to multiply with to get the gradient of a replica's own loss.

        The outermost wrapper of a stack undoes the division, once.
        """
        if self._is_outermost and self.loss_normalization == "global":
            return here.num_replicas
        return 1

    # Saving.

    def _what_a_save_loses(self) -> str | None:
        """What Keras and TensorFlow do not see, if there can be something."""
        return None

    def _lost_by_a_save(self) -> str | None:
        """The same, where replicas do differ now."""
        lost = self._what_a_save_loses()
        variables = [*self._trainable_variables, *self.variables]
        if lost and self.built and replica_variables.may_differ(variables):
            return lost
        return None

    def save_own_variables(self, store) -> None:
        """Saves this optimizer's own variables; Keras walks to the inner one.

        Says so once where only the values of replica 0 are saved.

        Args:
          store: A dict-like object, from Keras.
        """
        self._notice_of_saving.tell()
        super().save_own_variables(store)

    # Configuration.

    def get_config(self) -> dict:
        """The arguments, for serialization."""
        self._notice_of_saving.tell_in_legacy_save()
        return {
            "inner_optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
            "loss_normalization": self._loss_normalization,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict, custom_objects=None):
        """Makes an optimizer from `get_config`'s dict, which is not changed.

        Args:
          config: A dict.
          custom_objects: A dict of names and objects that Keras does not know.

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


def _scope_name(strategy) -> str:
    if replica_context.is_default(strategy):
        return "outside any strategy's scope"
    return f"in the scope of another strategy, {type(strategy).__name__},"


def _refuse_base_arguments(own_name: str, kwargs: dict) -> None:
    base_arguments = (
        "learning_rate",
        "weight_decay",
        "clipnorm",
        "clipvalue",
        "global_clipnorm",
        "use_ema",
        "ema_momentum",
        "ema_overwrite_frequency",
        "loss_scale_factor",
        "gradient_accumulation_steps",
    )
    for argument in kwargs:
        if argument in base_arguments:
            raise ValueError(
                f"{own_name} does not take {argument!r}: set it on the inner"
                f" optimizer, {own_name}(keras.optimizers.SGD("
                f"{argument}=...)). It acts on the reduced gradient there."
            )
        raise TypeError(f"{own_name} got an unknown argument {argument!r}.")


def _check_inner(own_name: str, inner) -> None:
    if isinstance(inner, tf.compat.v1.train.Optimizer):
        raise TypeError(
            f"{own_name} wraps Keras optimizers, got the TF1 optimizer"
            f" {type(inner).__name__}. Use tf_xshard.compat.v1.{own_name} for"
            " it, or give a Keras optimizer such as keras.optimizers.SGD(0.1)."
        )
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise TypeError(
            f"{own_name} wraps a keras.optimizers.Optimizer, got {inner!r}"
            f" ({type(inner).__name__}). Write {own_name}("
            "keras.optimizers.Adam(1e-3)), for example."
        )
