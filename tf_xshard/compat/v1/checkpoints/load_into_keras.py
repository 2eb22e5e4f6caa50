"""Loads checkpoints of TF1's optimizers into Keras models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard.compat.v1.checkpoints import slots as v1_slots
from tf_xshard.compat.v1.optimizers import agn_custom_getter
from tf_xshard.private.keras import optimizer_state


def load_into_keras(
    checkpoint: str,
    model: keras.Model,
    *,
    names: dict[str, str] | None = None,
) -> None:
    """Fills a Keras model and its optimizer from a TF1 checkpoint.

    The checkpoint was written by `tf.compat.v1.train.Saver`, after training
    with an optimizer of `tf.compat.v1.train`, optionally inside a TF1
    CrossShardOptimizer, TowerOptimizer or AGNOptimizer (the center is loaded).

    A weight gets the variable of its shape whose name is its path. The path can
    also end with the name ("sequential/dense/kernel" with "dense/kernel"), or
    the name with the path. Slots follow their variables. `iterations` comes
    from `global_step`, or from Adam's beta powers if the two disagree, because
    the powers count updates. Without either, `iterations` does not change.

    Args:
      checkpoint: A checkpoint's path, or a directory that contains checkpoints.
      model: A built model, compiled with the Keras counterpart of the v1
        optimizer: SGD (GradientDescent and Momentum), Adam, Adagrad, Adadelta,
        RMSprop or Ftrl, optionally inside a tf_xshard optimizer.
      names: A dict {path of a weight: name in the checkpoint}, for weights
        whose names do not match. Default: none.

    Raises:
      TypeError: If the model's optimizer is not in the list above.
      ValueError: If a variable of the checkpoint or of the model has no match.
        The error names all such variables, and nothing is changed.
      tf.errors.OpError: If there is no checkpoint.

    Example:

    >>> import tempfile
    >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    ...     w = tf.compat.v1.get_variable("dense/kernel", initializer=[[2.0]])
    ...     tf.compat.v1.train.AdamOptimizer().minimize(tf.reduce_sum(w)).name
    ...     session.run(tf.compat.v1.global_variables_initializer())
    ...     path = tf.compat.v1.train.Saver().save(
    ...         session, tempfile.mkdtemp() + "/model")
    'Adam'
    >>> model = keras.Sequential([
    ...     keras.layers.Input((1,)),
    ...     keras.layers.Dense(1, use_bias=False, name="dense")])
    >>> model.compile(tf_xshard.CrossShardOptimizer(keras.optimizers.Adam()))
    >>> tf_xshard.compat.v1.load_into_keras(path, model)
    >>> model.get_weights()[0].tolist()
    [[2.0]]

    Source: the variables' names of `tf.compat.v1.train`.
    """
    reader = tf.train.load_checkpoint(checkpoint)
    stored = _stored(reader)
    placed, unplaced = _weights(model, stored, names or {})
    optimizer = getattr(model, "optimizer", None)
    slots: dict[str, tuple[Any, np.ndarray]] = {}
    iterations = None
    if optimizer is not None:
        iterations = v1_slots.count_updates(optimizer, stored)
        slots, more = v1_slots.matched(
            optimizer, model, placed, stored, iterations
        )
        unplaced += more
    step_names = {
        name
        for name in stored
        if re.fullmatch(r"(.*/)?(global_step|beta[12]_power(_\d+)?)", name)
    }
    used = {name for _, name in placed} | set(slots) | step_names
    left = sorted(set(stored) - used)
    if left or unplaced:
        raise ValueError(
            f"{checkpoint} does not fit the model, and nothing was changed."
            f" Without a place: {[(n, tuple(stored[n].shape)) for n in left]}."
            f" Without a value: {unplaced}. The model's optimizer must be the"
            " counterpart of the one in the checkpoint; give"
            " names={path: name} for weights with other names."
        )
    for weight, name in placed:
        weight.assign(stored[name])
    for slot, value in slots.values():
        slot.assign(value)
    if iterations is not None:
        optimizer_state.set_iterations(
            v1_slots.innermost(optimizer), iterations
        )


def _stored(reader: tf.train.CheckpointReader) -> dict[str, np.ndarray]:
    """Reads all variables by name; AGNOptimizer's center has plain names."""
    prefix = agn_custom_getter.GLOBAL_VARIABLE_NAME + "/"
    return {
        name.removeprefix(prefix): reader.get_tensor(name)
        for name in reader.get_variable_to_shape_map()
    }


def _weights(
    model: keras.Model, stored: dict[str, np.ndarray], names: dict[str, str]
) -> tuple[list[tuple[keras.Variable, str]], list[Any]]:
    """Matches weights to the checkpoint's variables of equal shapes."""
    weights = model.weights
    paths = [weight.path for weight in weights]
    unknown = [
        pair
        for pair in names.items()
        if pair[0] not in paths or pair[1] not in stored
    ]
    if unknown:
        raise ValueError(
            f"names has pairs whose path or name does not exist: {unknown}. The"
            f" model has {sorted(paths)}, and the checkpoint {sorted(stored)}."
        )
    placed: list[tuple[keras.Variable, str]] = []
    unplaced: list[Any] = []
    for weight, path in zip(weights, paths, strict=True):
        shape = tuple(weight.shape)
        if paths.count(path) > 1:
            unplaced.append((path, shape, "a path of several weights"))
            continue
        found = [names[path]] if path in names else _candidates(path, stored)
        found = [n for n in found if stored[n].shape == shape]
        if len(found) == 1 and found[0] not in [name for _, name in placed]:
            placed.append((weight, found[0]))
        else:
            unplaced.append((path, shape))
    return placed, unplaced


def _candidates(path: str, stored: Iterable[str]) -> list[str]:
    """Lists the longest names that end with the path, or end the path."""
    return _longest(
        [
            name
            for name in stored
            if f"/{path}".endswith(f"/{name}")
            or f"/{name}".endswith(f"/{path}")
        ]
    )


def _longest(names: list[str]) -> list[str]:
    """Lists the most specific names, "a/kernel" instead of "kernel"."""
    length = max((len(name) for name in names), default=0)
    return [name for name in names if len(name) == length]
