"""What several towers have added up -> the gradients of one update."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import tensorflow as tf

from tf_xshard.distribute import indexed_slices
from tf_xshard.distribute import reduction_guard
from tf_xshard.distribute import site as site_lib
from tf_xshard.optimizers import accumulation
from tf_xshard.optimizers import inner_update
from tf_xshard.optimizers import tree
from tf_xshard.optimizers import wrapper
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import loss_scaling


class Aggregating(wrapper.OptimizerWrapper):
    """The part of TowerOptimizer that applies what towers have added up."""

    has_own_reducer = False
    _seen: accumulation.SeenVariables

    def forgetting_traces(self) -> contextlib.AbstractContextManager:
        """See the base class."""
        return self._seen.unchanged()

    def _weight(self, site: site_lib.Site) -> int:
        """`GroupReducer.weight` for the reduction that comes after a round."""
        for one in tree.wrappers(self.inner_optimizer):
            if one.has_own_reducer and not one._reducer.is_redundant:
                return one._reducer.weight(site, one.reduction)
        return 1

    def _apply_aggregate(
        self,
        totals: Sequence,
        variables: Sequence,
        site: site_lib.Site,
        num_towers: int | tf.Tensor,
        weight: int = 1,
    ) -> None:
        """Passes the mean or sum of several towers to the inner optimizer.

        Args:
          totals: The sums over the towers: tensors of the variables' shapes,
            IndexedSlices or None.
          variables: The variables.
          site: Where the code runs.
          num_towers: The number of towers, an int or a scalar tensor.
          weight: See `GroupReducer.weight`.
        """
        aggregated = _aggregate(
            totals,
            variables,
            num_towers,
            is_mean=self.reduction == "mean",
            weight=weight,
        )
        if tree.scales_loss_before_reduction(self.inner_optimizer):
            # Else replicas would skip the reduction, which others wait in.
            vote = loss_scaling.FiniteVote(
                site, self.communication, self._reducer.owner
            )
            vote.note(aggregated)
            aggregated = vote.apply(aggregated)
        with reduction_guard.guarded(self.inner_optimizer):
            self.inner_optimizer.apply(aggregated, variables)


def contribution(
    gradients: Sequence, variables: Sequence, factor: float
) -> list:
    """One tower's gradients as they are added up.

    Args:
      gradients: What a user passes to `apply`.
      variables: The variables.
      factor: What to multiply them with.

    Returns:
      Tensors of the variables' shapes, IndexedSlices or None; 16-bit gradients
      as float32, since sums would lose digits or overflow.
    """
    return [
        gradients_lib.scaled(
            indexed_slices.map_values(_widened, gradient),
            # A statistic of the replica is no gradient of its loss.
            1 if inner_update.is_overwritten(variable) else factor,
        )
        for gradient, variable in zip(
            gradients_lib.standardized(gradients, variables),
            variables,
            strict=True,
        )
    ]


def added(
    towers: Sequence[Sequence], variables: Sequence, factor: float
) -> list:
    """The sums of several towers' contributions.

    Args:
      towers: For each tower what a user passes to `apply`.
      variables: The variables.
      factor: What to multiply the gradients with.

    Returns:
      Tensors of the variables' shapes, IndexedSlices or None.
    """
    columns = zip(
        *[contribution(gradients, variables, factor) for gradients in towers],
        strict=True,
    )
    return [
        indexed_slices.added(column, variable)
        for column, variable in zip(columns, variables, strict=True)
    ]


def _aggregate(
    totals: Sequence,
    variables: Sequence,
    num_towers: int | tf.Tensor,
    is_mean: bool,
    weight: int = 1,
) -> list:
    """The mean or sum of several towers, in the variables' types.

    Args:
      totals: Sums over towers: tensors of the variables' shapes, IndexedSlices
        or None.
      variables: The variables.
      num_towers: How many towers, an int or a scalar tensor.
      is_mean: Whether the mean is wanted.
      weight: What gradients have been multiplied with in addition.

    Returns:
      A list like `totals`.
    """
    result = []
    for total, variable in zip(totals, variables, strict=True):
        if inner_update.is_overwritten(variable):
            divisor = num_towers
        else:
            divisor = (num_towers if is_mean else 1) * weight
        divided = functools.partial(
            _divided, divisor=divisor, dtype=variable.dtype
        )
        result.append(indexed_slices.map_values(divided, total))
    return result


def _widened(values: tf.Tensor) -> tf.Tensor:
    return tf.cast(values, tf.float32) if values.dtype.size < 4 else values


def _divided(
    total: tf.Tensor, *, divisor: int | tf.Tensor, dtype: str
) -> tf.Tensor:
    """`total / divisor` as `dtype`."""
    if tf.is_tensor(divisor) or divisor != 1:
        total /= gradients_lib.as_dtype(divisor, total.dtype)
    return tf.cast(total, dtype)
