"""What the loss was divided by and multiplied with, before it was derived."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tf_xshard.distribute import site as site_lib
from tf_xshard.optimizers import delegation
from tf_xshard.optimizers import scalar_loss
from tf_xshard.optimizers import stack
from tf_xshard.optimizers import tree
from tf_xshard.private import keras_optimizer_state
from tf_xshard.private import tensorflow as private_tensorflow


class LossConventions(delegation.Delegation):
    """The part of a wrapper that knows how losses are scaled.

    Keras divides a loss by the number of replicas, which the outermost wrapper
    of a stack undoes, once. A LossScaleOptimizer belongs inside.
    """

    inner_optimizer: keras.optimizers.Optimizer
    # Whether a LossScaleOptimizer may be inside.
    _supports_loss_scaling = True
    _is_outermost: bool
    _loss_normalization: str | None
    _strategy: tf.distribute.Strategy
    _has_checked_losses = False

    @private_tensorflow.entry_point
    def scale_loss(self, loss: Any) -> Any:
        """The loss times the inner optimizer's loss scale.

        Warns if `fit` calls this with a loss that Keras has not divided by the
        number of replicas.

        Args:
          loss: A scalar tensor.

        Returns:
          A scalar tensor.

        Example:

        >>> inner = keras.optimizers.SGD(loss_scale_factor=8.0)
        >>> tf_xshard.CrossShardOptimizer(inner).scale_loss(2.0)
        16.0
        """
        num_replicas = self._strategy.num_replicas_in_sync
        with stack.call_of(self):
            if (
                num_replicas > 1
                and self._is_outermost
                and not self._has_checked_losses
            ):
                self._has_checked_losses = True
                scalar_loss.warn_about_scalar_losses(num_replicas)
            return self.inner_optimizer.scale_loss(loss)

    def _refuse_loss_scale_optimizer_above(self) -> None:
        has_caller_of = keras_optimizer_state.has_caller_of
        # A MultiOptimizer lists an optimizer only after it has built it, so any
        # that is building is taken for the one around this wrapper.
        if tree.has_loss_scale_optimizer(self) and has_caller_of(
            keras.optimizers.Optimizer, tree.is_multi_optimizer
        ):
            raise ValueError(
                f"{self.name} has a LossScaleOptimizer inside and is itself"
                " inside a MultiOptimizer, which would not scale the loss, so"
                " the updates would be much too small. Put the"
                " LossScaleOptimizer around the MultiOptimizer: tf_xshard."
                "CrossShardOptimizer(keras.optimizers.LossScaleOptimizer("
                "keras.optimizers.MultiOptimizer(...)))."
            )
        if self._is_allowed_in_a_loss_scale_optimizer():
            return
        if has_caller_of(
            keras.optimizers.LossScaleOptimizer,
            lambda one: any(inner is self for inner in tree.descendants(one)),
        ):
            raise ValueError(self._loss_scale_error())

    def _is_allowed_in_a_loss_scale_optimizer(self) -> bool:
        """On one replica it sees all gradients; only one may scale the loss."""
        num_replicas = self._strategy.num_replicas_in_sync
        return not self._is_outermost or (
            num_replicas == 1
            and not tree.has_loss_scale_optimizer(self.inner_optimizer)
        )

    def _loss_scale_error(self) -> str:
        name = type(self).__name__
        num_replicas = self._strategy.num_replicas_in_sync
        why = (
            "There is another one inside, and both scale the loss."
            if tree.has_loss_scale_optimizer(self.inner_optimizer)
            else (
                f"It checks the gradients of replica 0 only, of {num_replicas},"
                " so an overflow on another replica would reach the weights."
            )
        )
        remedy = (
            f"Instead, write {name}(keras.optimizers.LossScaleOptimizer(inner))"
            " and"
            if self._supports_loss_scaling
            else (
                f"{name} does not support loss scaling: use the dtype policy"
                " mixed_bfloat16, which needs none, or"
            )
        )
        return (
            f"A LossScaleOptimizer wraps {name}. {why} (Under the dtype policy"
            " mixed_float16 model.compile() adds a LossScaleOptimizer by"
            f" itself.) {remedy} model.compile(..., auto_scale_loss=False)."
        )

    @property
    def loss_scale_factor(self) -> float | None:
        """The inner optimizer's `loss_scale_factor`."""
        return self._updating_optimizer.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: float | None) -> None:
        # The base class' constructor sets a default before there is an inner
        # optimizer.
        if "inner_optimizer" not in self.__dict__:
            return
        self._updating_optimizer.loss_scale_factor = value

    @property
    def loss_normalization(self) -> str:
        """What the incoming gradients were divided by.

        `"global"`: by the number of replicas, as Keras and TF2 do. `"replica"`:
        by nothing. One setting applies to a stack of wrappers.
        """
        return self._resolved_loss_normalization()

    def _resolved_loss_normalization(self) -> str:
        stack = tree.wrappers(self)
        given = {
            one._loss_normalization
            for one in stack
            if one._loss_normalization is not None
        }
        if len(given) > 1:
            raise ValueError(
                "A stack of tf_xshard optimizers has one loss_normalization,"
                f" got {sorted(given)} in"
                f" {[one.name for one in stack]}. Pass it to one of them."
            )
        return given.pop() if given else "global"

    def _gradient_multiplier(self, site: site_lib.Site) -> int:
        """The factor that undoes the 1/N that Keras applied to the loss.

        The outermost wrapper of a stack undoes it, once.
        """
        if self._is_outermost and self.loss_normalization == "global":
            return site.num_replicas
        return 1
