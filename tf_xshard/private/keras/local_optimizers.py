"""Makes Keras optimizers local to a replica by a class swap.

Keras sums gradients over all replicas inside every optimizer, after clipping
and weight decay, and no public switch turns the sum off (keras#19308). A local
optimizer updates each replica's own copy of the variables, in replica context,
from the gradients that it is given. All its features therefore also work inside
`tf.cond`, where Keras's own merge_call fails (gradient accumulation, EMA
overwriting; keras#20582).

The object's type becomes a subclass whose `__class__` returns the original
class, which preserves configs, files and `isinstance`:

    keras.optimizers.SGD                     LossScaleOptimizer
      |                                        |
    SGD (local)                              LossScaleOptimizer (local)
      |-- keras.optimizers.SGD                 |-- _LocalLossScale
      |-- _Local                               |-- LossScaleOptimizer
      |-- keras.optimizers.Optimizer           |-- keras.optimizers.Optimizer
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.private import names
from tf_xshard.private.keras import moving_averages
from tf_xshard.private.keras import saving as keras_saving
from tf_xshard.private.keras import shards as keras_shards
from tf_xshard.private.keras import wrapper_calls

_OPTIMIZER = "keras.optimizers.Optimizer."
# The class swap overrides and calls these names. Present in Keras 3.12 to 3.16.
# They are the only names without which `import tf_xshard` fails, since no
# optimizer works without them.
_SWAP = names.PrivateNames(
    "A tf_xshard optimizer",
    {
        # Sums over all replicas, which must not happen a second time.
        "all_reduce": _OPTIMIZER + "_all_reduce_sum_gradients",
        # TensorFlow's versions of these methods use merge_call. The base
        # class's versions do the same on any variable that they are given.
        "update_step": _OPTIMIZER + "_backend_update_step",
        "weight_decay": _OPTIMIZER + "_apply_weight_decay",
        "increment": _OPTIMIZER + "_backend_increment_gradient_accumulators",
        "overwrite": (
            _OPTIMIZER + "_overwrite_model_variables_with_average_value"
        ),
        # Keras 3.16 and newer call this method. Older versions call the method
        # above directly.
        "maybe_overwrite": (
            _OPTIMIZER + "_backend_maybe_overwrite_model_variables",
            _OPTIMIZER + "_overwrite_model_variables_with_average_value",
        ),
        # LossScaleOptimizer's update with merge_call, and without it.
        "tf_apply": "keras.optimizers.LossScaleOptimizer._tf_apply",
        "common_apply": "keras.optimizers.LossScaleOptimizer._common_apply",
        # The write behind every assign of a Keras variable.
        "direct_assign": "keras.Variable._direct_assign",
    },
)
_SWAP.check()
# TensorFlow's part of an optimizer, and the part of all backends.
_TFOptimizer: Any = names.defining_class(
    keras.optimizers.Optimizer, "_all_reduce_sum_gradients"
)
_BaseOptimizer: Any = names.defining_class(
    keras.optimizers.Optimizer, "_update_model_variables_moving_average"
)
# Present in 3.12 to 3.16.
_TRACKING = names.PrivateNames(
    "Building a tf_xshard optimizer",
    {
        # Says if an optimizer owns the variables that are assigned to its
        # attributes.
        "is_enabled": "keras.src.utils.tracking.is_tracking_enabled",
        "set_attribute": (
            "keras.src.backend.common.global_state.set_global_attribute"
        ),
    },
)


def make_local(optimizers: Iterable[keras.optimizers.Optimizer]) -> None:
    """Makes optimizers update only this replica; idempotent."""
    found = list(optimizers)
    refuse_own_reductions(found)
    for one in found:
        own: Any = type(one)
        scales_loss = isinstance(one, keras.optimizers.LossScaleOptimizer)
        mixin = _LocalLossScale if scales_loss else _Local
        if not issubclass(own, mixin):
            object.__setattr__(one, "__class__", _local_class(own, mixin))
        if not scales_loss and type(one._iterations) is keras.Variable:
            one._iterations.__class__ = _ReplicaLocalVariable


def refuse_own_reductions(
    optimizers: Iterable[keras.optimizers.Optimizer],
) -> None:
    """Raises TypeError if an optimizer overrides Keras's sum over replicas."""
    sums = _TFOptimizer._all_reduce_sum_gradients
    for one in optimizers:
        own: Any = type(one)
        if issubclass(own, _Local) or own._all_reduce_sum_gradients is sums:
            # distribute.reduction_guard notices other reductions when they are
            # called.
            continue
        raise TypeError(
            f"{own.__name__} overrides _all_reduce_sum_gradients. The gradients"
            " of an inner optimizer are reduced across replicas already and"
            f" would be reduced twice. Remove the method from {own.__name__}."
        )


@functools.cache
def _local_class(base: Any, mixin: Any) -> type:
    # `_Local` follows the class (its docstring says why). `_LocalLossScale`
    # precedes the class.
    bases = (base, mixin) if mixin is _Local else (mixin, base)
    return type(
        base.__name__,
        bases,
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            # Keras looks up the registered name by `obj.__class__`. Files must
            # contain the name of the original class.
            "__class__": property(lambda self: base),
        },
    )


class _InWrapper(keras.optimizers.Optimizer):
    """An optimizer that a wrapper calls, saves and loads."""

    def save_own_variables(self, store: Any) -> None:
        """Saves the optimizer's variables, or what a wrapper saves instead."""
        if not keras_saving.saves_something_else(self, store):
            super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Loads the optimizer's variables, unless a wrapper has done so."""
        if not keras_saving.skips_this_load(self, store):
            super().load_own_variables(store)

    def apply(
        self, grads: Sequence, trainable_variables: Sequence | None = None
    ) -> Any:
        """Applies gradients as Keras does; only a wrapper may call it."""
        num_replicas = self._distribution_strategy.num_replicas_in_sync
        if num_replicas > 1 and not wrapper_calls.is_inside():
            name = self.__class__.__name__
            raise RuntimeError(
                f"The {name} {self.name!r} is inside a tf_xshard optimizer,"
                f" so it no longer sums gradients over the {num_replicas}"
                " replicas. A direct call would let the replicas diverge."
                f" Call the tf_xshard optimizer, or create another {name}."
            )
        return super().apply(grads, trainable_variables)


class _Local(_InWrapper, moving_averages.Averages, keras_shards.UpdatesShards):
    """Mixes in between an optimizer's class and `keras.optimizers.Optimizer`.

    As the last class before the base in the method resolution order, it
    preserves a subclass's overrides (Nadam and Muon have some).
    """

    def _all_reduce_sum_gradients(
        self, grads_and_vars: Iterable[tuple]
    ) -> list[tuple]:
        return list(grads_and_vars)

    # TensorFlow's versions of these methods use merge_call.
    _apply_weight_decay = _BaseOptimizer._apply_weight_decay
    _backend_increment_gradient_accumulators = (
        _BaseOptimizer._backend_increment_gradient_accumulators
    )

    def _backend_maybe_overwrite_model_variables(
        self, trainable_variables: Sequence
    ) -> Any:
        # Keras 3.16 and newer call this method. TensorFlow's version of it
        # calls the next method inside merge_call.
        return _BaseOptimizer._backend_maybe_overwrite_model_variables(
            self, trainable_variables
        )

    def _overwrite_model_variables_with_average_value(
        self, trainable_variables: Sequence
    ) -> Any:
        strategy = self._distribution_strategy
        if strategy.num_replicas_in_sync == 1 or (
            tf.distribute.has_strategy()
            and not tf.distribute.in_cross_replica_context()
        ):
            return _BaseOptimizer._overwrite_model_variables_with_average_value(
                self, trainable_variables
            )
        # At the end of fit, each replica's average is written to its own
        # variable. Keras's own versions write replica 0's average to all.
        with strategy.scope():
            for variable, average in zip(
                trainable_variables,
                self._model_variables_moving_average,
                strict=True,
            ):
                if isinstance(average, keras_shards.Sharded):
                    average.store.write_into(average, variable)
                elif average is not None:
                    strategy.extended.update(
                        getattr(variable, "value", variable),
                        lambda copy, value: copy.assign(value),
                        args=(average.value,),
                    )


class _LocalLossScale(
    _InWrapper, keras_shards.TracksWholes, keras.optimizers.LossScaleOptimizer
):
    """Makes a LossScaleOptimizer decide on each replica separately.

    Keras decides for all replicas by replica 0's gradients. The wrapper gives
    all replicas non-finite gradients if any replica has them, so all replicas
    decide the same.
    """

    _model_variables_moving_average = moving_averages.FORWARDED

    def _tf_apply(
        self, grads: Sequence, trainable_variables: Sequence | None = None
    ) -> Any:
        return self._common_apply(grads, trainable_variables)

    @property
    def _updating_optimizer(self) -> keras.optimizers.Optimizer:
        return self.inner_optimizer

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """A MultiOptimizer's optimizers; other inner optimizers have none."""
        return self.inner_optimizer.optimizers


class _ReplicaLocalVariable(keras.Variable):
    """Counts on each replica, in the replica's own copy.

    Keras's step counter has the aggregation ONLY_FIRST_REPLICA. Each increment
    reads replica 0 by merge_call, which fails in `tf.cond` and is an AllToAll
    on a TPU. All replicas count the same, so none needs replica 0's value.
    """

    def _direct_assign(self, value: Any) -> Any:
        variable = self._value
        if (
            not isinstance(variable, tf.distribute.DistributedValues)
            or tf.distribute.in_cross_replica_context()
            or not tf.distribute.has_strategy()
        ):
            return super()._direct_assign(value)
        # In replica context, a distributed variable has this replica's handle.
        tf.raw_ops.AssignVariableOp(
            resource=variable.handle, value=tf.cast(value, variable.dtype)
        )


@contextlib.contextmanager
def tracked() -> Iterator[None]:
    """Makes an optimizer own the variables that it is given in this context."""
    # LossScaleOptimizer.build disables tracking for all that is built in it.
    before = _TRACKING.is_enabled()
    _TRACKING.set_attribute("tracking_on", True)
    try:
        yield
    finally:
        _TRACKING.set_attribute("tracking_on", before)
