"""Defines CrossShardOptimizer, AGNOptimizer and the TF1 wrappers' base class.

- `cross_shard`: `CrossShardOptimizer`, with and without a TPU.
- `agn`: `AGNOptimizer`, with its local steps, its exchanges, its session
  hook and its saver of the center.
- `agn_custom_getter`: AGNOptimizer's variables (local, center, accumulator).
- `base`: the wrappers' base class, which forwards to the inner optimizer;
  checks and converts losses and gradients from users.
- `inner_optimizers`: adapters for inner optimizers of TF1 and of Keras.
"""
