"""Finds the optimizer of tf_keras that sums gradients, and replaces the sum."""

from __future__ import annotations

import abc
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.private import names

# Present in tf_keras 2.20 and 2.21.
_LEGACY = names.PrivateNames(
    "tf_xshard.tf_keras",
    {
        # Legacy optimizers call this method, which calls `gradient_aggregator`.
        # A subclass may override it.
        "aggregate": (
            "tf_keras.optimizers.legacy.Optimizer._aggregate_gradients"
        ),
    },
)
names.attributes(
    _LEGACY.feature,
    "_aggregate_gradients",
    # Called before a legacy optimizer aggregates gradients.
    "_transform_unaggregated_gradients",
    # Makes an object a part of an optimizer's checkpoints.
    "_track_trackable",
    "_coalesced_children",
    # Creates the variables of a legacy optimizer before its first step.
    "_create_all_weights",
    # The optimizer inside Model Garden's ExponentialMovingAverage, which calls
    # its apply_gradients. Present in tf-models-official 2.20.
    "_optimizer",
)


class Aggregator(abc.ABC):
    """Reduces an optimizer's gradients instead of summing them."""

    # A part of the optimizer's checkpoints, if it has any.
    residuals: tf.Module | None = None

    @abc.abstractmethod
    def __call__(self, grads_and_vars: Iterable[tuple]) -> list[tuple]:
        """Reduces (gradient, variable) pairs for a step."""

    @abc.abstractmethod
    def reduced(self, pairs: list[tuple]) -> list[tuple]:
        """Reduces pairs for a plan, which is no step."""

    @abc.abstractmethod
    def update(
        self, pairs: list[tuple], apply: Callable[[list[tuple]], Any]
    ) -> Any:
        """Reduces pairs for a step, and calls a function with them.

        What the function writes waits for all gradients and reductions.
        """

    @abc.abstractmethod
    def begin_update(self) -> None:
        """Takes note that a replica applies gradients that a caller reduced.

        Raises RuntimeError if they have not been reduced, or if the caller may
        skip the step in a part of the groups.
        """


def _chain(optimizer: Any) -> list:
    """Returns an optimizer and the optimizers inside it, outermost first."""
    chain = [optimizer]
    while True:
        last = chain[-1]
        if hasattr(last, "inner_optimizer"):  # A LossScaleOptimizer.
            chain.append(last.inner_optimizer)
        elif any(
            one.__name__ == "ExponentialMovingAverage"
            and one.__module__.startswith("official.")
            for one in type(last).__mro__
        ):
            chain.append(last._optimizer)
        else:
            return chain


def scales_loss(optimizer: Any) -> bool:
    """Returns True if an optimizer is or has a LossScaleOptimizer."""
    return any(hasattr(one, "inner_optimizer") for one in _chain(optimizer))


def unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer that sums gradients, inside its wrappers.

    Raises TypeError if it is not an optimizer of tf_keras, or sums gradients in
    its own way.
    """
    import tf_keras

    optimizer = _chain(optimizer)[-1]
    kind = type(optimizer)
    if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        overrides = kind._aggregate_gradients is not _LEGACY.aggregate
        known = optimizer.gradient_aggregator.__module__.startswith("tf_keras.")
    elif isinstance(optimizer, tf_keras.optimizers.Optimizer):
        own = tf_keras.optimizers.Optimizer.aggregate_gradients
        overrides = kind.aggregate_gradients is not own
        known = "aggregate_gradients" not in vars(optimizer)
    else:
        raise TypeError(
            "with_aggregator takes an optimizer of tf_keras, got"
            f" {optimizer!r}. For an optimizer of Keras 3, use"
            " tf_xshard.CrossShardOptimizer."
        )
    if overrides or not known:
        raise TypeError(
            f"{kind.__name__} already has its own way to aggregate gradients"
            " across replicas, so they would be reduced twice. Pass an"
            " optimizer without a gradient_aggregator, whose class does not"
            " override aggregate_gradients."
        )
    return optimizer


def replace_sum(optimizer: Any, aggregator: Aggregator) -> None:
    """Makes an optimizer of `unwrapped` call an aggregator instead of summing.

    `apply_gradients` then calls `begin_update`. Checkpoints get the residuals.
    """
    if hasattr(optimizer, "gradient_aggregator"):
        optimizer.gradient_aggregator = aggregator
    else:
        optimizer.aggregate_gradients = aggregator
    # A method, which copy.deepcopy binds to the copy.
    optimizer.apply_gradients = types.MethodType(
        _guarded(type(optimizer).apply_gradients), optimizer
    )
    if aggregator.residuals is not None:
        optimizer._track_trackable(aggregator.residuals, "gradient_residuals")
        # New optimizers keep the children that a checkpoint once asked for.
        vars(optimizer).pop("_coalesced_children", None)


def _guarded(apply: Callable) -> Callable:
    parameters = inspect.signature(apply)

    @functools.wraps(apply)
    def apply_gradients(
        self: Any, grads_and_vars: Iterable[tuple], *args: Any, **kwargs: Any
    ) -> Any:
        pairs = list(grads_and_vars)
        bound = parameters.bind(self, pairs, *args, **kwargs)
        found = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        aggregator = aggregator_of(self)
        assert aggregator is not None
        if found.get("skip_gradients_aggregation") or not found.get(
            "experimental_aggregate_gradients", True
        ):
            aggregator.begin_update()
            return apply(self, pairs, *args, **kwargs)
        is_legacy = hasattr(self, "gradient_aggregator")
        # A legacy optimizer's aggregator gets no None.
        absent = [one for one in pairs if is_legacy and one[0] is None]
        present = [one for one in pairs if not is_legacy or one[0] is not None]
        if is_legacy:
            present = self._transform_unaggregated_gradients(present)

        def apply_reduced(reduced: list[tuple]) -> Any:
            bound.arguments["grads_and_vars"] = [*reduced, *absent]
            if is_legacy:
                bound.arguments["experimental_aggregate_gradients"] = False
            else:
                bound.arguments["skip_gradients_aggregation"] = True
            return apply(*bound.args, **bound.kwargs)

        return aggregator.update(present, apply_reduced)

    return apply_gradients


def aggregator_of(optimizer: Any) -> Aggregator | None:
    """Returns an optimizer's aggregator; None if it sums gradients."""
    inner = _chain(optimizer)[-1]
    found = getattr(inner, "gradient_aggregator", None)
    found = found or vars(inner).get("aggregate_gradients")
    return found if isinstance(found, Aggregator) else None


def created_variables(optimizer: Any, trained: Sequence) -> list:
    """Creates an optimizer's variables for its trained ones; returns them."""
    inner = _chain(optimizer)[-1]
    if hasattr(inner, "gradient_aggregator"):
        inner._create_all_weights(trained)
        return list(inner.variables())
    inner.build(trained)
    return list(inner.variables)


def uses_float16() -> bool:
    """Returns True if layers compute in float16, which needs loss scales."""
    import tf_keras

    return tf_keras.mixed_precision.global_policy().compute_dtype == "float16"
