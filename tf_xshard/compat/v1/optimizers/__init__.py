"""TF1's optimizers: CrossShardOptimizer and AGNOptimizer.

- `cross_shard`: `CrossShardOptimizer`, with and without a TPU.
- `agn`: `AGNOptimizer`: local steps, with an exchange now and then.
- `agn_custom_getter`: AGNOptimizer's variables: a worker's own, the center, an
  accumulator.
- `agn_operations`: its operations, on ref and on resource variables.
- `agn_session`: its session hook, and the saver of the center.
- `base`: what every wrapper forwards to the optimizer inside.
- `inner_optimizers`: the optimizer inside: TF1's own, or one of Keras.
- `losses_and_gradients`: losses and gradients as users of TF1 pass them.
"""
