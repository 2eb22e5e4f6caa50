"""Several shards of one computation in one graph, without a TPU.

- `shard`: `shard`, and the initializer of its variables.
- `traced_shards`: the shards while they are traced, each in a thread.
- `copies`: which variables are the shards' copies of which of shard 0.
- `shared_variables`: variables made outside of a computation that its shards
  assign.
- `sums`: where a CrossShardOptimizer sums, and over how many shards.
"""
