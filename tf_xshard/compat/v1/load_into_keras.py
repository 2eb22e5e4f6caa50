"""Checkpoints of TF1 optimizers, into Keras models."""

from __future__ import annotations

import math
import re

import keras
import numpy as np
import tensorflow as tf

from tf_xshard.compat.v1 import agn_custom_getter
from tf_xshard.compat.v1 import inner_optimizers
from tf_xshard.optimizers import tree
from tf_xshard.private import keras_optimizers

# For each Keras optimizer: its slots in the order in which the v1 optimizer
# makes its own, as (Keras' name, whether the v1 slot may be left out).
_SLOTS = {
    "SGD": lambda o: ["momentum"] if o.momentum else [],
    "Adam": lambda o: ["momentum", "velocity"],
    "Adagrad": lambda o: ["accumulator"],
    "Adadelta": lambda o: ["accumulated_grad", "accumulated_delta_var"],
    "Ftrl": lambda o: ["accumulator", "linear"],
    "RMSprop": lambda o: [
        "velocity",
        *(["average_gradient"] if o.centered else []),
        # The v1 optimizer has it always, and does not use it if it is zero.
        "momentum" if o.momentum else None,
    ],
}


_SMALLEST_POWER = 1e-30  # What float32 holds with all its digits.


def load_into_keras(
    checkpoint: str,
    model: keras.Model,
    *,
    names: dict[str, str] | None = None,
) -> None:
    """Fills a Keras model and its optimizer from a TF1 checkpoint.

    The checkpoint is one that `tf.compat.v1.train.Saver` wrote, of a model
    trained with an optimizer of `tf.compat.v1.train`, inside a TF1
    CrossShardOptimizer, TowerOptimizer or AGNOptimizer or not; of the last the
    center is taken.

    A variable of the checkpoint belongs to the weight that has its shape and
    its name, or whose path ends with its name ("dense/kernel" and
    "sequential/dense/kernel"), or whose path its own name ends with. Slots
    follow their variables. `iterations` comes from Adam's beta powers and from
    `global_step`; where they disagree, from the powers, which count updates.
    Without either it is left alone.

    Args:
      checkpoint: The checkpoint's path, or a directory with one.
      model: A built model. Compiled, with the Keras counterpart of the v1
        optimizer: SGD (GradientDescent and Momentum), Adam, Adagrad, Adadelta,
        RMSprop or Ftrl, inside a tf_xshard optimizer or not.
      names: For weights that names don't tell: the path of the weight and the
        name in the checkpoint. Default: none.

    Raises:
      TypeError: If the optimizer is another one.
      ValueError: If a variable of the checkpoint or of the model can't be
        placed; all are named, and nothing is changed.
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
    slots, iterations = {}, None
    if optimizer is not None:
        iterations = _iterations(optimizer, stored)
        slots, more = _slots(optimizer, model, placed, stored, iterations)
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
        keras_optimizers.set_iterations(_leaf(optimizer)[0], iterations)


def _stored(reader) -> dict[str, np.ndarray]:
    """All variables; AGN's center under the plain names."""
    prefix = agn_custom_getter.GLOBAL_VARIABLE_NAME + "/"
    return {
        name.removeprefix(prefix): reader.get_tensor(name)
        for name in reader.get_variable_to_shape_map()
    }


def _weights(model, stored, names) -> tuple[list, list]:
    """(weight, name) pairs, and what has no value."""
    weights = model.weights
    paths = [weight.path for weight in weights]
    unknown = [
        pair
        for pair in names.items()
        if pair[0] not in paths or pair[1] not in stored
    ]
    if unknown:
        raise ValueError(
            f"names has {unknown}. The model has {sorted(paths)}, and the"
            f" checkpoint {sorted(stored)}."
        )
    placed, unplaced = [], []
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


def _candidates(path, stored) -> list[str]:
    """Names that end with the path, or that the path ends with."""
    return _longest(
        [
            name
            for name in stored
            if f"/{path}".endswith(f"/{name}")
            or f"/{name}".endswith(f"/{path}")
        ]
    )


def _longest(names: list[str]) -> list[str]:
    """The names that say most: "a/kernel" before "kernel"."""
    length = max((len(name) for name in names), default=0)
    return [name for name in names if len(name) == length]


def _leaf(optimizer):
    leaves = [
        one
        for one in tree.descendants(optimizer)
        if not list(tree.children(one))
    ]
    kinds = [
        kind for kind in type(leaves[0]).__mro__ if kind.__name__ in _SLOTS
    ]
    if (
        len(leaves) > 1
        or not kinds
        or kinds[0].__name__ != (leaves[0].__class__.__name__)
    ):
        raise TypeError(
            f"{[one.__class__.__name__ for one in leaves]} has no counterpart"
            f" among TF1's optimizers. Supported: {sorted(_SLOTS)}."
        )
    return leaves[0], _SLOTS[kinds[0].__name__](leaves[0])


def _slots(optimizer, model, placed, stored, iterations) -> tuple:
    """{name in the checkpoint: (variable, value)}, and what has no value."""
    leaf, slot_names = _leaf(optimizer)
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    adapter = inner_optimizers.Keras(leaf)
    trainable = {id(variable) for variable in model.trainable_variables}
    weights = {name for _, name in placed}
    slots, unplaced = {}, []
    for weight, name in placed:
        if id(weight) not in trainable:
            continue
        found = _slots_of(name, stored, weights)
        targets = [
            _Nowhere() if one is None else adapter.get_slot(weight, one)
            for one in slot_names
        ]
        if len(found) != len(slot_names) or any(t is None for t in targets):
            unplaced.append(
                f"{slot_names} of {weight.path}, for which there is {found}"
            )
            continue
        for key, target in zip(found, targets, strict=True):
            value = stored[key]
            if isinstance(leaf, keras.optimizers.SGD):
                # v1 adds gradients up, Keras the steps.
                rate = keras_optimizers.learning_rate_at(leaf, iterations or 0)
                value = -rate * value
            slots[key] = target, value
    return slots, unplaced


class _Nowhere:
    """Takes what the Keras optimizer has no use for."""

    def assign(self, value) -> None:
        del value


def _slots_of(name, stored, weights) -> list[str]:
    """Names of a variable's slots, in the order in which they were made.

    All have the optimizer's name, the second and further ones a number behind
    it: NAME/Adam and NAME/Adam_1.
    """
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
        numbers = {
            one: re.fullmatch(re.escape(first) + r"_(\d+)", one)
            for one in suffixes
            if one != first
        }
        if all(numbers.values()):
            rest = sorted(numbers, key=lambda one: int(numbers[one][1]))
            return [prefix + one for one in (first, *rest)]
    return [prefix + one for one in suffixes]


def _iterations(optimizer, stored) -> int | None:
    leaf, _ = _leaf(optimizer)
    powers = {
        match[1]: float(value)
        for name, value in stored.items()
        if (match := re.fullmatch(r"(?:.*/)?(beta[12])_power(?:_\d+)?", name))
    }
    steps = [v for n, v in stored.items() if n.split("/")[-1] == "global_step"]
    global_step = int(steps[0]) if steps else None
    # Each power was multiplied once more than there were updates. The first
    # has underflowed after a thousand, and the second lasts longer.
    for which, beta in (
        ("beta2", getattr(leaf, "beta_2", None)),
        ("beta1", getattr(leaf, "beta_1", None)),
    ):
        if not beta or which not in powers:
            continue
        power = max(powers[which], _SMALLEST_POWER)
        counted = round(math.log(power) / math.log(beta)) - 1
        if power == _SMALLEST_POWER:
            # At least so many; the bias correction is over by far.
            return counted if global_step is None else global_step
        if global_step is None or abs(global_step - counted) > (
            0.01 * counted + 1
        ):
            return counted
        return global_step  # A power's float32 is not that exact.
    return global_step
