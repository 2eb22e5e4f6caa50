"""Runs TPUEstimator without a TPU.

- `tpu_estimator`: `TPUEstimator`, which trains, evaluates and predicts;
  checks metrics and predictions.
- `tpu_config`: `RunConfig`, `TPUConfig` and `InputPipelineConfig`; the
  unsupported arguments, and what to use instead.
- `estimator_spec`: `TPUEstimatorSpec`, `EstimatorSpec`, `ModeKeys` and export
  outputs.
- `model_calls`: calls model_fn and input_fn, and checks what they return.
- `model_directory`: reads the checkpoints in model_dir.
- `sessions`: makes graphs and sessions, saves, and writes summaries.
"""
