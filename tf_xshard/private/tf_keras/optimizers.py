"""Finds the optimizer of tf_keras that sums gradients, and replaces the sum."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

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
names.attributes(_LEGACY.feature, "_aggregate_gradients")


def unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer that sums gradients, inside LossScaleOptimizers.

    Raises TypeError if it is not an optimizer of tf_keras, or sums gradients in
    its own way.
    """
    import tf_keras

    while isinstance(
        optimizer, tf_keras.mixed_precision.LossScaleOptimizer
    ) or hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
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


def replace_sum(optimizer: Any, aggregator: Any) -> None:
    """Makes an optimizer of `unwrapped` call an aggregator instead of summing.

    `apply_gradients` then calls `aggregator.refuse_skip` if a caller asks it
    not to aggregate.
    """
    if hasattr(optimizer, "gradient_aggregator"):
        optimizer.gradient_aggregator = aggregator
    else:
        optimizer.aggregate_gradients = aggregator
    optimizer.apply_gradients = _guarded(
        optimizer.apply_gradients, aggregator.refuse_skip
    )


def _guarded(apply: Callable, refuse_skip: Callable[[], None]) -> Callable:
    parameters = inspect.signature(apply)

    @functools.wraps(apply)
    def apply_gradients(*args: Any, **kwargs: Any) -> Any:
        found = parameters.bind(*args, **kwargs).arguments
        found = {**found, **found.pop("kwargs", {})}
        if found.get("skip_gradients_aggregation") or not found.get(
            "experimental_aggregate_gradients", True
        ):
            refuse_skip()
        return apply(*args, **kwargs)

    return apply_gradients


def uses_float16() -> bool:
    """Returns True if layers compute in float16, which needs loss scales."""
    import tf_keras

    return tf_keras.mixed_precision.global_policy().compute_dtype == "float16"
