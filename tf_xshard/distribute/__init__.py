"""A replica's view of itself, and its own copies of variables.

Enters: the current `tf.distribute` context. Leaves: a `Site` (which strategy,
which replica, which process), this replica's values, and gradients as
IndexedSlices. Nothing here communicates. Imports `private`.
"""
