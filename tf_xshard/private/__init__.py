"""Names that TensorFlow, Keras and jax do not export; used only here.

Enters: objects of TensorFlow and Keras. Leaves: plain functions over them, each
private name with a comment that says why and which versions have it. If a new
version moves a name, the feature that needs it raises an error with that name,
and the fix belongs here. Only the class swap of `keras_optimizers` is needed by
all, and checked when `tf_xshard` is imported. Imports only the modules beside
the folders.

- `names`: declares private names, and resolves them when they are needed.
- `tensorflow`: AutoGraph, the key-value store, aborting collectives, threads.
- `keras_optimizers`: optimizers made local (the class swap).
- `keras_optimizer_state`: attributes that a wrapper has to keep in order.
- `keras_moving_averages`: those of the weights, as SwapEMAWeights finds them.
- `keras_shards`: variables of which each replica holds a shard;
  `keras_sharded_updates`: optimizers of these.
- `keras_saving`: what Keras' files hold, and where.
- `keras_models`: attributes of a model while `fit` runs and while it is saved.
- `keras_training_loops`: the loops of `fit` over several processes.
- `tensorflow_v1`: TF1 graphs and optimizers.
- `tpu_iterators`: distributed datasets, for `tf_xshard.testing` only.
- `tpu_simulation`: TPUStrategy and jax, for `tf_xshard.testing` only.
"""
