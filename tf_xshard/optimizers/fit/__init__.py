"""Losses and a train step for `fit`.

- `global_mean`: `GlobalMean`, the mean over the items of all replicas.
- `scalar_loss`: `ScalarLoss`, and the warning about losses of one number.
- `tower_train_step`: the train step that splits a batch over towers.
"""
