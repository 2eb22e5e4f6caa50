"""Uses names that Keras does not export.

- `local_optimizers`: the class swap, which makes optimizers local to a replica.
- `wrapper_internals`: a wrapper's node in a `tf.train.Checkpoint`.
- `wrapper_calls`: whether a wrapper is calling the optimizers inside it.
- `optimizer_state`: reads and sets private attributes of optimizers.
- `moving_averages`: the averages of weights that SwapEMAWeights looks for.
- `shards`: `Sharded`, a variable that is split over replicas; lets Keras's
  optimizers create and update it.
- `saving`: finds an optimizer's state under the paths of a Keras file.
- `fit_internals`: attributes of a model while `fit` runs and while it is saved.
- `losses`: evaluates a loss with another reduction, and counts its items.
- `symbolic_calls`: whether Keras only computes shapes.
- `multi_worker_patches`: replaces functions of `fit` that fail across
  processes.
"""
