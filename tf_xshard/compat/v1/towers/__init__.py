"""Several towers of one model_fn, and one update.

- `replicate_model_fn`: `tf.contrib.estimator.replicate_model_fn`.
- `tower`: `TowerOptimizer`: one update from several towers.
- `build_state`: the towers of a graph while they are built.
- `merge_specs`: what all towers return, as one spec.
"""
