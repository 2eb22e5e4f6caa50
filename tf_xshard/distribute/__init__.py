"""A replica's view of itself, and its own copies of variables.

Enters: the current `tf.distribute` context. Leaves: a `Site` (which strategy,
which replica, which process), this replica's values, and gradients as
IndexedSlices. Nothing here communicates. Imports `private`.

- `site`: where code runs; the only reader of `tf.distribute`'s context.
- `replica_variables`: variables with a value of their own on each replica, and
  the dtype of accumulators.
- `variable_role`: what a variable's gradient is, and what may be done with it.
- `indexed_slices`: gradients of some rows of a variable.
- `shards`: how a tensor is split over the replicas of a group.
- `reduction_guard`: notices an inner optimizer that reduces by itself.
"""
