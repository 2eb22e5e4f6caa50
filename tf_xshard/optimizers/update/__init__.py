"""Applies reduced gradients to variables, with the inner optimizer.

- `whole`: each replica updates whole variables.
- `sharded`: `shard_update=True`; each replica of a group updates a shard.
- `clipping`: clips shards of gradients by the norms of whole gradients.
- `elementwise`: decides which optimizers may update shards.
- `slots`: saves and loads sharded slot variables as whole values.
"""
