"""The documented TF1 optimizers: see `tf_xshard.compat.v1`."""

from tf_xshard.compat import v1

__all__ = ("v1",)
