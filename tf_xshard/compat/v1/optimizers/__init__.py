"""CrossShardOptimizer, AGNOptimizer, and what all TF1 wrappers share.

- `cross_shard`: `CrossShardOptimizer`, with and without a TPU.
- `agn`: `AGNOptimizer`, with its local steps and periodic exchanges.
- `agn_custom_getter`: AGNOptimizer's variables (local, center, accumulator).
- `agn_operations`: AGNOptimizer's operations, on ref and resource variables.
- `agn_session`: AGNOptimizer's session hook, and its saver of the center.
- `base`: the wrappers' base class, which forwards to the inner optimizer.
- `inner_optimizers`: adapters for inner optimizers of TF1 and of Keras.
- `losses_and_gradients`: checks and converts losses and gradients from users.
"""
