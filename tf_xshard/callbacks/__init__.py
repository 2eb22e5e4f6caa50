"""Keras callbacks for groups of replicas and for AGNOptimizer's center.

Enters: the events of `fit`. Leaves: saves, columns in the logs, errors. Each
callback is a thin layer on top of other folders, mainly `group_state`. Imports
`group_state` and above.

- `group_checkpoint`: saves every group in `fit`, and resumes from a save.
- `group_validation`: adds each group's validation metrics to the logs.
- `divergence_sentinel`: finds replicas of one group that differ.
- `learning_rate_warmup`: raises the learning rate over the first epochs.
- `swap_center_weights`: validates and saves with AGNOptimizer's center.
- `preemption`: agrees between processes that one was asked to end.
- `communication_ledger`: logs the collectives, bytes and seconds of each epoch.
"""
