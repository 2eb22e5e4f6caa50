"""Adapts TF1's optimizers to the stages of `reduction` and `optimizers`.

Enters: TF1 graphs, `tf.function`s and eager code with optimizers of
`tf.compat.v1.train`. Leaves: the operations or updates that TF1 documents.
Gradients are reduced by `reduction`. Imports `reduction`, `optimizers` and
above.

- `v1`: a folder for each subject of TF1, such as `shard` or TPUEstimator.
"""

from tf_xshard.compat import v1

__all__ = ("v1",)
