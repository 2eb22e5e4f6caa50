"""Reduces gradients over groups of replicas for tf_keras (Keras 2).

Enters: each replica's gradients, which tf_keras's optimizers pass on before
they apply them. Leaves: the reduced gradients. The stages are those of
`CrossShardOptimizer`. Imported on request, and imports tf_keras only when a
function is called. May import `callbacks` and the folders above it.

- `aggregation`: `gradient_aggregator` and `with_aggregator`.
- `ledger`: `communication_ledger`, a callback.
"""

from tf_xshard.tf_keras.aggregation import (
    gradient_aggregator as gradient_aggregator,
)
from tf_xshard.tf_keras.aggregation import with_aggregator as with_aggregator
from tf_xshard.tf_keras.ledger import (
    communication_ledger as communication_ledger,
)

__all__ = ("communication_ledger", "gradient_aggregator", "with_aggregator")
