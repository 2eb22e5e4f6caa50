"""Uses names that TensorFlow does not export.

- `autograph`: keeps AutoGraph from converting this package's code.
- `tracing`: finds XLA, replicas, loops and new variables in a running trace.
- `custom_gradient`: replaces the gradient of tensors.
- `local_devices`, `operations`, `first_values`: for `compare`, several devices
  of one process, each operation that runs, and when new variables get values.
- `runtime`: which functions TensorFlow runs; aborts its collectives; the
  key-value store of several processes.
- `iterators`: ends distributed datasets, for `tf_xshard.testing` only.
- `v1`: graphs and optimizers of TF1, for `tf_xshard.compat`.
"""
