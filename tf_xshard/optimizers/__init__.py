"""The Keras optimizers: CrossShardOptimizer, TowerOptimizer, AGNOptimizer.

Enters: gradients and variables, from `fit` or a training loop, in replica
context. Leaves: updated variables, on this replica. Each optimizer's `_step`
reads like its drawing, as named stages; the arithmetic is in `reduction`.
Imports `reduction` and above.

- `base`: `GradientWrapper`, the base class of the three: forwards, builds,
  saves, and refuses what it can't do.
- `cross_shard`, `tower`, `agn`: the three optimizers, each in one file.
- `stack`: walks over nested optimizers; `StackPlan` says which of them reduces,
  over which groups, and who undoes the 1/N of the loss.
- `arguments`: checks what all three take.
- `hooks`: calls `pre_reduce` and `post_reduce` on unscaled gradients.
- `accumulator`: sums over calls, of TowerOptimizer and AGNOptimizer; whole, and
  before anything is communicated.
- `center`: AGNOptimizer's center, beside the local variables.
- `update`: reduced gradients -> variables, whole or sharded.
- `saving`: a stack of optimizers in Keras' files.
- `fit`: losses and train steps for `fit`.
"""
