"""A stack of optimizers in files.

- `keras_file`: where Keras' files hold the state of nested optimizers.
- `warning`: warns if a save loses what other replicas hold.

How tf.train.Checkpoint sees a stack: `private.keras.wrapper_internals`.
"""
