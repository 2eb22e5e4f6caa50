"""Keras callbacks for groups of replicas and for AGNOptimizer's center.

Enters: the events of `fit`. Leaves: saves, columns in the logs, errors. Each
callback is a thin layer over `group_state`. Imports `group_state` and above.

- `group_checkpoint`: saves every group in `fit`, and resumes from there.
- `group_validation`: every column of `GroupState.evaluate`, in the logs of
  `fit`.
- `divergence_sentinel`: finds unexpected differences between a group's
  replicas.
- `learning_rate_warmup`: raises the learning rate over the first epochs.
- `swap_center_weights`: shows AGNOptimizer's center to validation and saving.
- `communication_ledger`: logs what was communicated.
"""
