"""TPUEstimator, without a TPU.

- `tpu_estimator`: `TPUEstimator`, which trains, evaluates and predicts.
- `tpu_config`: `RunConfig`, `TPUConfig` and `InputPipelineConfig`.
- `estimator_spec`: `EstimatorSpec`, `ModeKeys` and export outputs.
- `tpu_estimator_spec`: `TPUEstimatorSpec`, and calls of its functions.
- `model_calls`: calls model_fn and input_fn, and checks what they return.
- `model_directory`: reads the checkpoints in model_dir.
- `sessions`: makes graphs and sessions, saves, and writes summaries.
- `results`: checks metrics and predictions; splits predictions into rows.
- `refused_arguments`: unsupported arguments, and what to use instead.
"""
