"""The Keras optimizers: CrossShardOptimizer, TowerOptimizer, AGNOptimizer.

Enters: gradients and variables, from `fit` or a training loop, in replica
context. Leaves: updated variables, on this replica. Each optimizer's `_step`
reads like its drawing, as named stages; the arithmetic is in `reduction`.
Imports `reduction` and above.
"""
