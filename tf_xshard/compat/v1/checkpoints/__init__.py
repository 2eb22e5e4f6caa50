"""Checkpoints of TF1, in Keras models.

- `load_into_keras`: matches a checkpoint's variables to a model's weights.
- `slots`: converts slots and step counts of TF1's optimizers for Keras.
"""
