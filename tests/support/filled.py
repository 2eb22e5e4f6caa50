"""Models whose variables all hold other values, which a file has to keep."""

import keras
import numpy as np
import tensorflow as tf

from tests.support import replicas


def model(optimizer_fn, strategy=None, is_built=True):
    """A dense layer, compiled with an optimizer."""
    with (strategy or tf.distribute.get_strategy()).scope():
        result = keras.Sequential(
            [keras.layers.Input((8,)), keras.layers.Dense(16)]
        )
        loss = keras.losses.MeanSquaredError()
        result.compile(optimizer_fn(), loss, auto_scale_loss=False)
        if is_built:
            result.optimizer.build(result.trainable_variables)
    return result


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
    """Saves a model, and returns what `load` needs: a path or values."""
    if way == "set_weights":
        state = [v.numpy() for v in model.optimizer.variables]
        return model.get_weights(), state
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


def load(optimizer_fn, strategy, way, saved):
    """Loads a model.

    Args:
      optimizer_fn: Makes its optimizer, if the file is no whole model.
      strategy: The strategy.
      way: The suffix of the file; "built" or "unbuilt" for a checkpoint, and
        whether it is read after the optimizer has been built or before; or
        "set_weights".
      saved: What `save` has returned.
    """
    with strategy.scope():
        if way in ("keras", "h5"):
            loaded = keras.models.load_model(saved)
        else:
            loaded = model(optimizer_fn, strategy, way != "unbuilt")
        if way == "set_weights":
            loaded.set_weights(saved[0])
            loaded.optimizer.set_weights(saved[1])
        elif "weights" in way:
            loaded.load_weights(saved)
        elif way in ("built", "unbuilt"):
            checkpoint(loaded).restore(saved).expect_partial()
        if not loaded.optimizer.built:
            loaded.optimizer.build(loaded.trainable_variables)
    return loaded
