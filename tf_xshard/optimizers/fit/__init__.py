"""What `fit` needs beside an optimizer.

- `scalar_loss`: losses that return one number, which Keras does not divide.
- `tower_train_step`: a train step that splits a batch over towers.
"""
