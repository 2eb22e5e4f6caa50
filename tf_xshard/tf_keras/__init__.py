"""Reduces gradients over groups of replicas for tf_keras (Keras 2).

Enters: each replica's gradients, which tf_keras's optimizers pass on before
they apply them. Leaves: the reduced gradients. The stages are those of
`CrossShardOptimizer`. Imported on request, and imports tf_keras only when an
optimizer is given. May import `optimizers` and the folders above it.

- `aggregation`: `gradient_aggregator` and `with_aggregator`.
"""

from tf_xshard.tf_keras.aggregation import (
    gradient_aggregator as gradient_aggregator,
)
from tf_xshard.tf_keras.aggregation import with_aggregator as with_aggregator

__all__ = ("gradient_aggregator", "with_aggregator")
