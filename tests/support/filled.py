"""Models whose variables all hold other values, which a file has to keep."""

import keras
import numpy as np
import tensorflow as tf

from tests.support import replicas


def variables(model):
    """Weights and all state of the optimizer."""
    return [*model.trainable_variables, *model.optimizer.variables]


def fill(model, seed=5):
    """Assigns a value to each variable, the same on all replicas.

    Returns:
      The values, which are whole and positive.
    """
    rng = np.random.default_rng(seed)
    values = [rng.integers(1, 100, one.shape) for one in variables(model)]
    for variable, value in zip(variables(model), values, strict=True):
        variable.assign(value)
    return values


def check(model, values, some=variables):
    """Every replica has the given values, in some variables."""
    for variable, value in zip(some(model), values, strict=True):
        for one in replicas.values(model.distribute_strategy, variable):
            np.testing.assert_array_equal(one, value, variable.path)


def checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def save(model, way, path):
    """Saves a model, and returns the path for `load`."""
    if way in ("built", "unbuilt"):
        return checkpoint(model).save(str(path))
    path = f"{path}.{way}"
    if "weights" not in way:
        model.save(path)
    elif path.endswith("h5"):
        model.save_weights(path)
    else:
        # Hundreds of bytes, in GB: each path may be in another file.
        model.save_weights(path, max_shard_size=6e-7)
    return path


def load(make, strategy, way, path):
    """Loads a model.

    Args:
      make: Makes the model that loads the file, if that is no whole model.
      strategy: The strategy.
      way: The suffix of the file; "built" or "unbuilt" for a checkpoint, and
        whether it is read after the optimizer has been built or before.
      path: The path.
    """
    with strategy.scope():
        is_whole = way in ("keras", "h5")
        model = keras.models.load_model(path) if is_whole else make()
        if way != "unbuilt" and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        if "weights" in way:
            model.load_weights(path)
        elif way in ("built", "unbuilt"):
            checkpoint(model).restore(path).expect_partial()
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
    return model
