"""TPUEstimator, without a TPU.

- `tpu_estimator`: `TPUEstimator`: train, evaluate and predict.
- `tpu_config`: `RunConfig` and `TPUConfig`.
- `estimator_spec`: what a model_fn returns.
- `tpu_estimator_spec`: what a TPUEstimator's model_fn returns.
- `model_calls`: calls model_fn and input_fn, and checks what they return.
- `model_directory`: the checkpoints in model_dir.
- `sessions`: its sessions, and what it does around their steps.
- `results`: what `evaluate` and `predict` return.
- `refused_arguments`: arguments that have no meaning without a TPU.
"""
