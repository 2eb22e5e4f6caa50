"""What TensorFlow does not export.

- `autograph`: keeps AutoGraph away from this package's code.
- `tracing`: what is being traced: XLA, replicas, loops, new variables.
- `cluster`: the key-value store of several processes.
- `runtime`: what TensorFlow's runtime executes, and ending its collectives.
- `iterators`: distributed datasets, for `tf_xshard.testing` only.
- `v1`: TF1 graphs and optimizers.
"""
