"""Reduced gradients -> the inner optimizer -> variables.

- `whole`: each replica updates whole variables.
- `sharded`: each replica of a group updates a shard of them.
- `clipping`: clips the gradients of shards by the norms of the wholes.
- `elementwise`: which optimizers compute the same on a shard.
- `slots`: a sharded optimizer's slot variables as whole values.
"""
