"""Checkpoints of TF1, in Keras models.

- `load_into_keras`: loads checkpoints of TF1's optimizers into Keras models.
- `slots`: slots and step counts of TF1's optimizers, for those of Keras.
"""
