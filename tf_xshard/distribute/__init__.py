"""Finds the current replica, and handles its own values of variables.

Enters: the current `tf.distribute` context. Leaves: a `Site` (strategy, replica
and process), this replica's values, and gradients as IndexedSlices. No module
of this folder communicates. Imports `private`.

- `site`: which strategies are supported; finds the replica and the process.
- `replica_variables`: creates, reads and writes variables that differ by
  replica; the dtype of accumulators.
- `variable_role`: which variables' gradients are reduced, sharded and clipped.
- `engines`: which engine started this process (Slurm, MPI, torchrun), and the
  rank that it gave; imports no TensorFlow.
- `lone_training`: raises if one of several processes trains alone.
- `indexed_slices`: converts, deduplicates and adds IndexedSlices.
- `shards`: splits a tensor over the replicas of a group, and joins shards.
- `ownership`: divides whole variables among the replicas of a group, and packs
  them for collectives.
- `reduction_guard`: raises if an inner optimizer reduces gradients itself.
"""
