"""Loads variables and slots of TF1's checkpoints into Keras models."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard.compat.v1.optimizers import agn_custom_getter
from tf_xshard.compat.v1.optimizers import inner_optimizers
from tf_xshard.optimizers import stack
from tf_xshard.private.keras import optimizer_state

# For each optimizer, Keras's names of its slots, in the order in which the v1
# optimizer makes its slots. None is a v1 slot that Keras does not have.
_SLOTS: dict[str, Callable[[Any], list[str | None]]] = {
    "SGD": lambda o: ["momentum"] if o.momentum else [],
    "Adam": lambda o: ["momentum", "velocity"],
    "Adagrad": lambda o: ["accumulator"],
    "Adadelta": lambda o: ["accumulated_grad", "accumulated_delta_var"],
    "Ftrl": lambda o: ["accumulator", "linear"],
    "RMSprop": lambda o: [
        "velocity",
        *(["average_gradient"] if o.centered else []),
        # The v1 optimizer always has this slot; Keras has it only if momentum
        # is not zero.
        "momentum" if o.momentum else None,
    ],
}
# float32 still holds this value in full precision.
_SMALLEST_POWER = 1e-30


def innermost(optimizer: Any) -> keras.optimizers.Optimizer:
    """Returns the optimizer inside all wrappers, if TF1 has a counterpart."""
    leaves = [
        one
        for one in stack.descendants(optimizer)
        if not list(stack.children(one))
    ]
    names = [one.__class__.__name__ for one in leaves]
    if len(leaves) > 1:
        raise TypeError(
            f"The model has several optimizers, {names}, but a TF1 checkpoint"
            " has the slots of one optimizer. Compile the model with one"
            " optimizer."
        )
    # The class's own name decides, since a subclass of another name may have
    # other slots.
    if names[0] not in _SLOTS:
        raise TypeError(
            f"{names[0]} has no counterpart among TF1's optimizers. Supported:"
            f" {sorted(_SLOTS)}."
        )
    return leaves[0]


def matched(
    optimizer: Any,
    model: keras.Model,
    placed: list[tuple[keras.Variable, str]],
    stored: dict[str, np.ndarray],
) -> tuple[list[tuple[keras.Variable, list[str]]], list[Any]]:
    """Matches the optimizer's slots to the checkpoint's slots.

    Returns the names of each weight's slots in the checkpoint. Builds nothing.
    """
    inner = innermost(optimizer)
    slot_names = _SLOTS[inner.__class__.__name__](inner)
    adapter = inner_optimizers.Keras(inner)
    trainable = {id(variable) for variable in model.trainable_variables}
    weights = {name for _, name in placed}
    slots: list[tuple[keras.Variable, list[str]]] = []
    unplaced: list[Any] = []
    for weight, name in placed:
        if id(weight) not in trainable:
            continue
        found = _slots_of(name, stored, weights)
        updated = _updated(optimizer, weight)
        is_missing = inner.built and any(
            one is not None and adapter.get_slot(updated, one) is None
            for one in slot_names
        )
        if len(found) != len(slot_names) or is_missing:
            unplaced.append(
                f"{slot_names} of {weight.path}, for which the checkpoint has"
                f" {found}"
            )
            continue
        slots.append((weight, found))
    return slots, unplaced


def _updated(optimizer: Any, weight: keras.Variable) -> keras.Variable:
    """Returns a weight, or its center if an AGNOptimizer has been built."""
    for one in stack.descendants(optimizer):
        if hasattr(one, "center_variables"):
            for index in optimizer_state.indices_of(one, [weight]):
                return one.center_variables[index]
    return weight


def _assign_slots(
    optimizer: Any,
    slots: list[tuple[keras.Variable, list[str]]],
    stored: dict[str, np.ndarray],
    iterations: int | None,
) -> None:
    """Assigns what `matched` returned to a built optimizer's slots."""
    inner = innermost(optimizer)
    slot_names = _SLOTS[inner.__class__.__name__](inner)
    adapter = inner_optimizers.Keras(inner)
    for weight, found in slots:
        for key, name in zip(found, slot_names, strict=True):
            if name is None:
                continue
            value = stored[key]
            if isinstance(inner, keras.optimizers.SGD):
                # v1's momentum accumulates gradients, and Keras's momentum
                # accumulates steps.
                rate = optimizer_state.learning_rate_at(inner, iterations or 0)
                value = -rate * value
            slot = adapter.get_slot(_updated(optimizer, weight), name)
            assert slot is not None, f"{weight.path} has no slot {name!r}"
            slot.assign(value)


def _slots_of(
    name: str, stored: dict[str, np.ndarray], weights: set[str]
) -> list[str]:
    """Lists the names of a variable's slots, in the order of their creation."""
    # All slots have the optimizer's name. From the second slot on, a number is
    # appended, as in NAME/Adam and NAME/Adam_1.
    prefix = name + "/"
    suffixes = [
        key.removeprefix(prefix)
        for key in stored
        if key.startswith(prefix)
        and "/" not in key.removeprefix(prefix)
        and key not in weights
        and stored[key].shape == stored[name].shape
    ]
    for first in suffixes:
        others = [one for one in suffixes if one != first]
        numbers = {
            one: int(match[1])
            for one in others
            if (match := re.fullmatch(re.escape(first) + r"_(\d+)", one))
        }
        if len(numbers) == len(others):
            rest = sorted(numbers, key=lambda one: numbers[one])
            return [prefix + one for one in (first, *rest)]
    return [prefix + one for one in suffixes]


def count_updates(optimizer: Any, stored: dict[str, np.ndarray]) -> int | None:
    """Computes the number of updates from scalars in the checkpoint."""
    inner = innermost(optimizer)
    powers = {
        match[1]: float(value)
        for name, value in stored.items()
        if (match := re.fullmatch(r"(?:.*/)?(beta[12])_power(?:_\d+)?", name))
    }
    steps = [v for n, v in stored.items() if n.split("/")[-1] == "global_step"]
    global_step = int(steps[0]) if steps else None
    # Before the first update, a power is beta itself. beta1's power underflows
    # after about a thousand updates, and beta2's power much later.
    for which, beta in (
        ("beta2", getattr(inner, "beta_2", None)),
        ("beta1", getattr(inner, "beta_1", None)),
    ):
        if not beta or which not in powers:
            continue
        power = max(powers[which], _SMALLEST_POWER)
        counted = round(math.log(power) / math.log(beta)) - 1
        if power == _SMALLEST_POWER:
            # At least `counted` updates were made, and the bias correction has
            # long become 1.
            return counted if global_step is None else global_step
        if global_step is None or abs(global_step - counted) > (
            0.01 * counted + 1
        ):
            return counted
        return global_step  # The difference is float32's rounding.
    return global_step


def load_into_keras(
    checkpoint: str,
    model: keras.Model,
    *,
    names: dict[str, str] | None = None,
) -> None:
    """Fills a Keras model and its optimizer from a TF1 checkpoint.

    `tf.compat.v1.train.Saver` must have written the checkpoint, after training
    with an optimizer of `tf.compat.v1.train`. The optimizer may have been
    inside a TF1 CrossShardOptimizer, TowerOptimizer or AGNOptimizer (the center
    is loaded).

    A weight gets the variable that has the same shape and whose name is the
    weight's path. The path can also end with the name
    ("sequential/dense/kernel" with "dense/kernel"), or the name with the path.
    Slots follow their variables. `iterations` comes from `global_step`, or from
    Adam's beta powers if the two disagree, because the powers count updates.
    Without either, `iterations` does not change.

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
        The error names all such variables. Nothing is changed, and an optimizer
        that has not been built stays so.
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

    Source: the variable names of `tf.compat.v1.train`.
    """
    reader = tf.train.load_checkpoint(checkpoint)
    stored = _stored(reader)
    placed, unplaced = _weights(model, stored, names or {})
    optimizer = getattr(model, "optimizer", None)
    slots: list[tuple[keras.Variable, list[str]]] = []
    iterations = None
    if optimizer is not None:
        iterations = count_updates(optimizer, stored)
        slots, more = matched(optimizer, model, placed, stored)
        unplaced += more
    step_names = {
        name
        for name in stored
        if re.fullmatch(r"(.*/)?(global_step|beta[12]_power(_\d+)?)", name)
    }
    of_slots = {name for _, found in slots for name in found}
    used = {name for _, name in placed} | of_slots | step_names
    left = sorted(set(stored) - used)
    if left or unplaced:
        raise ValueError(
            f"{checkpoint} does not fit the model, and nothing was changed."
            " Only in the checkpoint:"
            f" {[(n, tuple(stored[n].shape)) for n in left]}. Only in the"
            f" model: {unplaced}. The model's optimizer must correspond to the"
            " checkpoint's optimizer. For weights with other names, pass"
            " names={path: name}."
        )
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    for weight, name in placed:
        weight.assign(stored[name])
        # An AGNOptimizer may be in mid-period.
        _updated(optimizer, weight).assign(stored[name])
    if optimizer is not None:
        _assign_slots(optimizer, slots, stored, iterations)
    if iterations is not None:
        optimizer_state.set_iterations(innermost(optimizer), iterations)


def _stored(reader: tf.train.CheckpointReader) -> dict[str, np.ndarray]:
    """Reads all variables by name; AGNOptimizer's center has plain names."""
    prefix = agn_custom_getter.GLOBAL_VARIABLE_NAME + "/"
    names = reader.get_variable_to_shape_map()
    of_center = {n.removeprefix(prefix) for n in names if n.startswith(prefix)}
    # A worker's local copies and their slots may have been saved, too. All
    # workers continue from the center.
    read = {
        name
        for name in names
        if name not in of_center and name.rpartition("/")[0] not in of_center
    }
    return {
        name.removeprefix(prefix): reader.get_tensor(name)
        for name in names
        if name.startswith(prefix) or name in read
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
            f" model has {sorted(paths)}, and the checkpoint has"
            f" {sorted(stored)}."
        )
    placed: list[tuple[keras.Variable, str]] = []
    unplaced: list[Any] = []
    for weight, path in zip(weights, paths, strict=True):
        shape = tuple(weight.shape)
        if paths.count(path) > 1:
            unplaced.append((path, shape, "several weights have this path"))
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
