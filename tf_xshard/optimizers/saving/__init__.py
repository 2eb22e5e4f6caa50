"""Saves nested optimizers in files, and loads them.

- `keras_file`: which optimizer's state is at which path of a Keras file.
- `warning`: the warning that a save loses the state of other replicas.

For tf.train.Checkpoint, see `private.keras.wrapper_internals`.
"""
