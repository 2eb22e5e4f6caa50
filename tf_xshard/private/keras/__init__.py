"""What Keras does not export.

- `local_optimizers`: makes optimizers local to a replica (the class swap).
- `wrapper_internals`: what Keras and TensorFlow call on a wrapper under private
  names; a wrapper's node in a checkpoint.
- `wrapper_calls`: whether a wrapper is calling the optimizers inside it.
- `optimizer_state`: attributes that a wrapper keeps in order.
- `moving_averages`: the averages of weights that SwapEMAWeights looks for.
- `shards`: variables of which each replica holds a shard.
- `sharded_updates`: optimizers whose variables are shards.
- `saving`: what Keras' files hold, and where.
- `fit_internals`: attributes of a model while `fit` runs and while it is saved.
- `multi_worker_patches`: the loops of `fit` over several processes.
"""
