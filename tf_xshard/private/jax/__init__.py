"""Uses names that jax does not export, for `tf_xshard.testing` only.

- `tpu_simulation`: makes XLA:CPU execute TPUStrategy's programs.
"""
