"""The documented TF1 optimizers, running where the originals can't."""

from tf_xshard.compat.v1.cross_shard_optimizer import CrossShardOptimizer
from tf_xshard.compat.v1.shards import SHARD_VARIABLES
from tf_xshard.compat.v1.sharding import shard
from tf_xshard.compat.v1.sharding import shard_initializer

__all__ = (
    "CrossShardOptimizer",
    "SHARD_VARIABLES",
    "shard",
    "shard_initializer",
)
