"""Converts slots and step counts of v1 optimizers for Keras optimizers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

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
            " has the slots of one. Compile the model with one of them."
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
    iterations: int | None,
) -> tuple[dict[str, tuple[Any, np.ndarray]], list[Any]]:
    """Matches the optimizer's slots to the checkpoint's slots."""
    inner = innermost(optimizer)
    slot_names = _SLOTS[inner.__class__.__name__](inner)
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    adapter = inner_optimizers.Keras(inner)
    trainable = {id(variable) for variable in model.trainable_variables}
    weights = {name for _, name in placed}
    slots: dict[str, tuple[Any, np.ndarray]] = {}
    unplaced: list[Any] = []
    for weight, name in placed:
        if id(weight) not in trainable:
            continue
        found = _slots_of(name, stored, weights)
        targets = [
            _Discarded() if one is None else adapter.get_slot(weight, one)
            for one in slot_names
        ]
        if len(found) != len(slot_names) or any(t is None for t in targets):
            unplaced.append(
                f"{slot_names} of {weight.path}, for which there is {found}"
            )
            continue
        for key, target in zip(found, targets, strict=True):
            value = stored[key]
            if isinstance(inner, keras.optimizers.SGD):
                # v1's momentum accumulates gradients, and Keras's momentum
                # accumulates steps.
                rate = optimizer_state.learning_rate_at(inner, iterations or 0)
                value = -rate * value
            slots[key] = target, value
    return slots, unplaced


class _Discarded:
    """A stand-in for a slot that the Keras optimizer does not have."""

    def assign(self, value: np.ndarray) -> None:
        """Drops a value of any shape."""
        del value


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
