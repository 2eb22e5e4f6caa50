"""Names that TensorFlow, Keras and jax do not export; used only here.

Enters: objects of TensorFlow and Keras. Leaves: plain functions over them, each
private name with a comment that says why and which versions have it. If a new
version moves a name, the feature that needs it raises an error with that name,
and the fix belongs here. Only the class swap of `keras.local_optimizers` is
needed by all, and checked when `tf_xshard` is imported. Imports only the
modules beside the folders.

- `names`: declares private names, and resolves them when they are needed.
- `frames`: who called a function, where nothing else tells.
- `keras`, `tensorflow`, `jax`: a room for each library.
"""
