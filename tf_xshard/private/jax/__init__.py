"""What jax does not export, for `tf_xshard.testing` only.

- `tpu_simulation`: TPUStrategy's programs for XLA:CPU.
"""
