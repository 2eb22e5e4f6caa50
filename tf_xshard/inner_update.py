"""Reduced gradients -> inner optimizer -> variables, with no second reduction.

Keras sums gradients over all replicas inside every optimizer, after clipping
and weight decay, and has no public switch for that (keras#19308). Here an inner
optimizer is made local: it updates each replica's own copy of the variables, in
replica context, from the gradients that it is given. Then everything it does
works inside `tf.cond` too, where Keras' own way through merge_call fails
(gradient accumulation, EMA overwriting: keras#20582).

With `keras_multi_worker` the only module that imports what Keras does not
export; `keras_trainer` touches attributes of models.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer as _TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer as _BaseOptimizer
from keras.src.utils import tracking as _tracking

from tf_xshard import indexed_slices
from tf_xshard import versions

# Keras' private names, each with the reason. Seen in 3.12 to 3.15.
# tests/private_names_test.py fails with the name when a version moves one.
KERAS_PRIVATE_NAMES = (
    # The sum over all replicas, which must not happen a second time.
    (_TFOptimizer, "_all_reduce_sum_gradients"),
    # These go through merge_call in TFOptimizer; BaseOptimizer's versions do
    # the same on whatever variable they are given.
    (_TFOptimizer, "_backend_update_step"),
    (_TFOptimizer, "_apply_weight_decay"),
    (_TFOptimizer, "_backend_increment_gradient_accumulators"),
    (_BaseOptimizer, "_backend_update_step"),
    (_BaseOptimizer, "_apply_weight_decay"),
    (_BaseOptimizer, "_backend_increment_gradient_accumulators"),
    (_BaseOptimizer, "_overwrite_model_variables_with_average_value"),
    # LossScaleOptimizer's way through merge_call, and the one without.
    (keras.optimizers.LossScaleOptimizer, "_tf_apply"),
    (keras.optimizers.LossScaleOptimizer, "_common_apply"),
    # The write behind every assign of a Keras variable.
    (keras.Variable, "_direct_assign"),
    # What an optimizer is built with belongs to the model. Assigned while Keras
    # tracks, it would become the optimizer's own.
    (_tracking, "DotNotTrackScope"),
)
# Attributes of instances, used the same way:
# `_learning_rate`         the variable or schedule behind learning_rate
# `_iterations`            the step counter, aggregation ONLY_FIRST_REPLICA:
#                          each increment would go through merge_call
# `_distribution_strategy` the strategy in whose scope the optimizer was made
# `_trainable_variables`, `_trainable_variables_indices`, `_var_key`,
# `_check_variables_are_known`, `_variables`, `_track_trackable`
#                          what a subclass of Optimizer has to keep in order

_REDUCING_METHODS = (
    "apply",
    "apply_gradients",
    "update_step",
    "_backend_apply_gradients",
    "_backend_update_step",
)


def children(optimizer) -> Iterator[keras.optimizers.Optimizer]:
    """The optimizers that `optimizer` hands gradients to."""
    if hasattr(optimizer, "inner_optimizer"):
        yield optimizer.inner_optimizer
    elif hasattr(optimizer, "optimizers"):
        yield from optimizer.optimizers


def descendants(optimizer) -> Iterator[keras.optimizers.Optimizer]:
    """`optimizer` and every optimizer below it."""
    yield optimizer
    for child in children(optimizer):
        yield from descendants(child)


def make_local(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer, and all below it, update this replica only.

    Changes the type of the object to a subclass, which answers to `__class__`
    with the original, so that configs, files and `isinstance` stay as they
    were. Idempotent; called again after `build`, where a MultiOptimizer may
    make its optimizers.

    Args:
      optimizer: The inner optimizer.

    Raises:
      TypeError: If an optimizer reduces gradients by itself in a way that can't
        be taken out.
    """
    found = [one for one in descendants(optimizer) if not is_wrapper(one)]
    # All are looked at before any is changed.
    for one in found:
        _refuse_own_reduction(one)
    for one in found:
        if isinstance(one, keras.optimizers.LossScaleOptimizer):
            _change_class(one, _LocalLossScale)
            continue
        _change_class(one, _Local)
        if type(one._iterations) is keras.Variable:
            one._iterations.__class__ = _ReplicaLocalVariable


def is_wrapper(optimizer) -> bool:
    """Whether this is one of tf_xshard's own optimizers."""
    return getattr(optimizer, "is_tf_xshard_wrapper", False)


def _refuse_own_reduction(optimizer) -> None:
    own = type(optimizer)
    if issubclass(own, _Local):
        return
    found = None
    if own._all_reduce_sum_gradients is not (
        _TFOptimizer._all_reduce_sum_gradients
    ):
        found = "_all_reduce_sum_gradients"
    for name in _REDUCING_METHODS:
        names = getattr(getattr(own, name), "__code__", None)
        if (
            not getattr(own, name).__module__.startswith("keras.src.")
            and names is not None
            and "all_reduce" in names.co_names
        ):
            found = name
    if found:
        raise TypeError(
            f"{own.__name__}.{found} reduces gradients over the replicas by"
            " itself; inside a tf_xshard optimizer they would be reduced twice."
            " Take the reduction out of the inner optimizer."
        )


@functools.cache
def _local_class(base: type, mixin: type) -> type:
    # `_Local` goes behind the class (see there), `_LocalLossScale` before it.
    bases = (base, mixin) if mixin is _Local else (mixin, base)
    return type(
        base.__name__,
        bases,
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            # Keras looks up by `obj.__class__` under which name a class is
            # registered; the original's is what belongs into a file.
            "__class__": property(lambda self: base),
        },
    )


def _change_class(optimizer, mixin) -> None:
    if not issubclass(type(optimizer), mixin):
        object.__setattr__(
            optimizer, "__class__", _local_class(type(optimizer), mixin)
        )


class _Local(keras.optimizers.Optimizer):
    """Comes between an optimizer's class and `keras.optimizers.Optimizer`.

    As the last class before the base in the method resolution order, it leaves
    what a subclass overrides in force (Nadam and Muon do).
    """

    def _all_reduce_sum_gradients(self, grads_and_vars):
        return list(grads_and_vars)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        return _BaseOptimizer._backend_update_step(
            self, grads, trainable_variables, learning_rate
        )

    def _apply_weight_decay(self, variables):
        return _BaseOptimizer._apply_weight_decay(self, variables)

    def _backend_increment_gradient_accumulators(self, grads, acc_grads):
        return _BaseOptimizer._backend_increment_gradient_accumulators(
            self, grads, acc_grads
        )

    def _overwrite_model_variables_with_average_value(
        self, trainable_variables
    ):
        strategy = self._distribution_strategy
        if strategy.num_replicas_in_sync == 1 or (
            tf.distribute.has_strategy()
            and not tf.distribute.in_cross_replica_context()
        ):
            return _BaseOptimizer._overwrite_model_variables_with_average_value(
                self, trainable_variables
            )
        # At the end of fit: each replica's average into its own variable.
        # Keras' own versions write replica 0's into all.
        with strategy.scope():
            for variable, average in zip(
                trainable_variables,
                self._model_variables_moving_average,
                strict=True,
            ):
                if average is not None:
                    strategy.extended.update(
                        getattr(variable, "value", variable),
                        lambda copy, value: copy.assign(value),
                        args=(average.value,),
                    )


class _LocalLossScale(keras.optimizers.LossScaleOptimizer):
    """LossScaleOptimizer that decides on each replica for itself.

    Keras' way decides on replica 0's gradients for all. The wrapper makes all
    replicas see a non-finite gradient where one does, so each decides alike.
    """

    def _tf_apply(self, grads, trainable_variables=None):
        return self._common_apply(grads, trainable_variables)


class _ReplicaLocalVariable(keras.Variable):
    """A counter that each replica counts in its own copy.

    Keras' step counter is ONLY_FIRST_REPLICA: each increment asks replica 0 by
    merge_call, which fails in `tf.cond` and is an AllToAll on a TPU. All
    replicas count alike, so none needs to ask.
    """

    def _direct_assign(self, value):
        variable = self._value
        if (
            not isinstance(variable, tf.distribute.DistributedValues)
            or tf.distribute.in_cross_replica_context()
            or not tf.distribute.has_strategy()
        ):
            return super()._direct_assign(value)
        # In replica context a distributed variable's handle is this replica's.
        tf.raw_ops.AssignVariableOp(
            resource=variable.handle, value=tf.cast(value, variable.dtype)
        )


def untracked():
    """A context in which attributes take variables without owning them."""
    return _tracking.DotNotTrackScope()


def set_iterations(optimizer, iterations: int) -> None:
    """Sets how many updates an optimizer has made."""
    # With accumulation Keras counts calls, and divides when it is asked.
    steps = optimizer.gradient_accumulation_steps or 1
    optimizer._iterations.assign(iterations * steps)


def learning_rate_at(optimizer, iterations: int) -> float:
    """The learning rate of the update after `iterations` updates."""
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return float(rate(iterations))
    return float(optimizer.learning_rate)


def is_overwritten(variable) -> bool:
    """Whether Keras assigns a variable its "gradient", as float8 training does.

    That is a statistic of the replica and no gradient of its loss.
    """
    return getattr(variable, "overwrite_with_gradient", False)


def loss_scale_optimizer_in(optimizer) -> bool:
    """Whether a LossScaleOptimizer is among an optimizer and those below it."""
    return any(
        isinstance(one, keras.optimizers.LossScaleOptimizer)
        for one in descendants(optimizer)
    )


def apply(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence,
    variables: Sequence,
) -> None:
    """Lets the inner optimizer apply reduced gradients on this replica.

    Through `apply_gradients`, as `fit` does, which a subclass may override.
    """
    if any(one.loss_scale_factor for one in descendants(optimizer)):
        # Keras divides gradients by it, and IndexedSlices can't be divided.
        gradients = [
            indexed_slices.dense(gradient, variable)
            if isinstance(gradient, tf.IndexedSlices)
            else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
    optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))


versions.check_names(KERAS_PRIVATE_NAMES)
