"""CrossShardOptimizer, AGNOptimizer, and what all TF1 wrappers share.

- `cross_shard`: `CrossShardOptimizer`, with and without a TPU.
- `agn`: `AGNOptimizer`, with its local steps, its exchanges, its session
  hook and its saver of the center.
- `agn_custom_getter`: AGNOptimizer's variables (local, center, accumulator).
- `base`: the wrappers' base class, which forwards to the inner optimizer;
  checks and converts losses and gradients from users.
- `inner_optimizers`: adapters for inner optimizers of TF1 and of Keras.
"""
