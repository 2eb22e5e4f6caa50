"""A loss and a train step for `fit`.

- `scalar_loss`: `ScalarLoss`, and the warning about losses of one number.
- `tower_train_step`: the train step that splits a batch over towers.
"""
