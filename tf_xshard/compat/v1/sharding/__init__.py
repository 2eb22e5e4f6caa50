"""Builds several shards of one computation into one graph, without a TPU.

- `shard`: `shard`, and `shard_initializer` for the shards' variables.
- `traced_shards`: traces the shards, each in its own thread.
- `copies`: maps shard 0's variables to the other shards' copies.
- `shared_variables`: lets shards assign variables made outside them.
- `sums`: sums gradients for CrossShardOptimizer, wherever it runs.
- `cross_replica_sum`: `cross_replica_sum`, which sums any tensor over shards.
"""
