"""Builds several towers of one model_fn, and updates once.

- `replicate_model_fn`: splits the batch, calls model_fn for each tower,
  and merges the towers' specs into one.
- `tower`: `TowerOptimizer`, which applies the sum of all towers' gradients.
- `build_state`: the state of a graph's towers while they are built.
"""
