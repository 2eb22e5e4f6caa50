"""Uses the names that TensorFlow, Keras and jax do not export.

Enters: objects of TensorFlow and Keras. Leaves: plain functions over them. A
comment on each private name says why it is needed and which versions have it.
If a new version moves a name, the feature that needs it raises an error with
that name. Fix it in this folder. All features need the class swap of
`keras.local_optimizers`, so `import tf_xshard` checks the names of the swap.
Imports only the modules next to the folders.

- `names`: declares private names, and resolves them when a feature needs them.
- `frames`: lists the callers of a function, as a last resort.
- `keras`, `tf_keras`, `tensorflow`, `jax`: a folder for each library's private
  names.
"""
