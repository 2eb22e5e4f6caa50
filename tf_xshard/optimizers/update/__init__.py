"""Applies reduced gradients to variables, with the inner optimizer.

- `whole`: each replica updates whole variables.
- `sharded`: `shard_update=True`; each replica of a group updates a shard,
  clipped by the norm of the whole gradient.
- `elementwise`: decides which optimizers may update shards.
- `slots`: saves and loads sharded slot variables as whole values.
"""
