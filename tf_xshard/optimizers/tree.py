"""Walks over nested optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras


def children(optimizer: Any) -> Iterator[keras.optimizers.Optimizer]:
    """The optimizers that `optimizer` passes gradients to.

    Args:
      optimizer: A Keras optimizer, including wrappers (ours or Keras').

    Yields:
      The inner optimizer, or all of a MultiOptimizer's.
    """
    if hasattr(optimizer, "inner_optimizer"):
        yield optimizer.inner_optimizer
    elif hasattr(optimizer, "optimizers"):
        yield from optimizer.optimizers


def descendants(optimizer: Any) -> Iterator[keras.optimizers.Optimizer]:
    """`optimizer` and every optimizer that its gradients can reach."""
    yield optimizer
    for child in children(optimizer):
        yield from descendants(child)


def with_local_optimizers(
    optimizer: Any,
) -> Iterator[keras.optimizers.Optimizer]:
    """`descendants`, with local optimizers after each AGNOptimizer."""
    for one in descendants(optimizer):
        yield one
        local = getattr(one, "local_optimizer", None)
        if local is not None:
            yield from descendants(local)


def is_multi_optimizer(optimizer: Any) -> bool:
    """Whether this is Keras' MultiOptimizer, which Keras 3.15 introduced."""
    kind = getattr(keras.optimizers, "MultiOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def is_wrapper(optimizer: Any) -> bool:
    """Whether this is one of tf_xshard's own optimizers."""
    return getattr(optimizer, "is_tf_xshard_wrapper", False)


def wrappers(optimizer: Any) -> list[Any]:
    """tf_xshard's own optimizers among `descendants`."""
    return [one for one in descendants(optimizer) if is_wrapper(one)]


def unreduced(optimizer: Any) -> list[Any]:
    """The innermost optimizers that no wrapper passes its gradients to."""
    if is_wrapper(optimizer):
        return []
    found = list(children(optimizer))
    if not found:
        return [optimizer]
    return [one for child in found for one in unreduced(child)]


def scales_loss_before_reduction(optimizer: Any) -> bool:
    """Whether gradients reach a LossScaleOptimizer before a wrapper."""
    if is_wrapper(optimizer):
        return False
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or any(
        scales_loss_before_reduction(child) for child in children(optimizer)
    )


def has_loss_scale_optimizer(optimizer: Any) -> bool:
    """Whether a LossScaleOptimizer is among `descendants`."""
    return any(
        isinstance(one, keras.optimizers.LossScaleOptimizer)
        for one in descendants(optimizer)
    )
