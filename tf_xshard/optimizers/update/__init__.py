"""Applies reduced gradients to variables, with the inner optimizer.

- `whole`: each replica updates whole variables.
- `sharded`: `shard_update=True`; each replica of a group updates a part of the
  variables, clipped by the norm of the whole gradient.
- `kinds`: decides which optimizers may update shards, and which need whole
  variables.
- `slots`: saves and loads sharded slot variables as whole values.
"""
