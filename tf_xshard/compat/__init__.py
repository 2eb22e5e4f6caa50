"""The documented TF1 optimizers: see `tf_xshard.compat.v1`.

Enters: TF1 graphs, `tf.function` and eager code with optimizers of
`tf.compat.v1.train`. Leaves: the operations or updates that the originals
document. Adapters over the stages of `reduction` and `optimizers`, which it
imports, and what is above; no arithmetic of its own.

- `v1`: one room for each of the originals' subjects.
"""

from tf_xshard.compat import v1

__all__ = ("v1",)
