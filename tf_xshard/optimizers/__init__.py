"""Defines CrossShardOptimizer, TowerOptimizer and AGNOptimizer for Keras.

Takes gradients and variables, from `fit` or a training loop, in replica
context. Updates the variables on this replica. Each `_step` follows the drawing
of its class in named stages; the arithmetic is in `reduction`. May import
`reduction` and the folders above it.

- `base`: the base class of all three, with `apply`, `build` and forwarding.
- `cross_shard`: CrossShardOptimizer, which reduces over groups, between the
  user's `pre_reduce` and `post_reduce`.
- `tower`: TowerOptimizer, with rounds, `apply_towers` and `reset`.
- `agn`: AGNOptimizer, with local steps, a center, exchanges and `show_center`.
- `hooks`: calls `pre_reduce` and `post_reduce`.
- `stack`: plans which nested optimizer reduces (groups), and which undoes 1/N.
- `local_variables`: the variables that a CrossShardOptimizer does not reduce.
- `skipping`: counts, limits and reports steps that are skipped.
- `arguments`: checks the arguments that all three take.
- `accumulator`: sums gradients over calls, before communication (tower, agn).
- `run`: what a call passes from wrapper to wrapper, and writes at its end.
- `commit`: lets a call write after its gradients and reductions exist.
- `update`: updates variables with the inner optimizer, whole or sharded.
- `saving`: nested optimizers in Keras's files, and the warning of lost state.
- `fit`: `GlobalMean`, `ScalarLoss` and `tower_train_step`.
"""
