"""Reads and sets attributes of Keras's optimizers, for wrappers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.private import frames
from tf_xshard.private import names

# Present in Keras 3.12 to 3.16.
names.attributes(
    "A tf_xshard optimizer",
    # The variable or schedule behind learning_rate.
    "_learning_rate",
    # The step counter. Each increment would use merge_call, since its
    # aggregation is ONLY_FIRST_REPLICA.
    "_iterations",
    # The strategy in whose scope the optimizer was created.
    "_distribution_strategy",
    # State that a subclass of Optimizer must maintain.
    "_trainable_variables",
    "_var_key",
    "_variables",
    "_track_trackable",
)

# `exclude_from_weight_decay` sets these attributes: keys of variables, and a
# pattern of names or None. Present in Keras 3.12 to 3.16.
_EXCLUDED = "_exclude_from_weight_decay"
_EXCLUDED_NAMES = "_exclude_from_weight_decay_pattern"

# Present in Keras 3.12 to 3.16.
MUON = names.PrivateNames(
    "Muon in CrossShardOptimizer(shard_update=True)",
    # Returns whether Muon updates a variable like AdamW, element by element.
    {"uses_adamw": "keras.optimizers.Muon._should_use_adamw"},
)


def track(optimizer: keras.optimizers.Optimizer, child: Any, name: str) -> None:
    """Makes `tf.train.Checkpoint` find an object under an optimizer."""
    optimizer._track_trackable(child, name, overwrite=True)


def strategy_of(
    optimizer: keras.optimizers.Optimizer,
) -> tf.distribute.Strategy:
    """Returns the strategy in whose scope an optimizer was created."""
    return optimizer._distribution_strategy


def trainable_variables(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    """Returns the variables that an optimizer was built with, or []."""
    return optimizer._trainable_variables or []


def set_trainable_variables(
    optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]
) -> None:
    """Does what the base class's `build` does, without creating variables."""
    # `use_ema` and similar settings are forwarded, so `build` would create the
    # inner optimizer's variables twice. A plain assignment would make Keras
    # track the variables as the optimizer's own.
    object.__setattr__(optimizer, "_trainable_variables", variables)
    optimizer.built = True


def indices_of(
    optimizer: keras.optimizers.Optimizer, variables: Sequence
) -> list[int]:
    """Returns the positions of variables in `trainable_variables`."""
    # A Keras variable and the TensorFlow variable inside it have the same key.
    key = optimizer._var_key
    positions = {
        key(one): index
        for index, one in enumerate(trainable_variables(optimizer))
    }
    found = [positions.get(key(one)) for one in variables]
    return [index for index in found if index is not None]


def unknown_to(
    optimizer: keras.optimizers.Optimizer, variables: Sequence
) -> list[str]:
    """Returns the names of variables that an optimizer was not built with."""
    key = optimizer._var_key
    known = {key(one) for one in trainable_variables(optimizer)}
    return [
        getattr(one, "path", one.name)
        for one in variables
        if key(one) not in known
    ]


def own_variables(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    """Returns the variables that a wrapper has created itself."""
    # The base class's step counter stays 0, since the inner optimizer counts.
    return [v for v in optimizer._variables if v is not optimizer._iterations]


def excluded_from_weight_decay(
    optimizer: keras.optimizers.Optimizer, variables: Sequence
) -> list[Any]:
    """Returns the variables that an optimizer's weight decay excludes."""
    keys = getattr(optimizer, _EXCLUDED, ())
    pattern = getattr(optimizer, _EXCLUDED_NAMES, None)
    return [
        one
        for one in variables
        if optimizer._var_key(one) in keys
        or (pattern is not None and pattern.search(one.name))
    ]


def settings(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Returns what a traced update of an optimizer does not read again."""
    plain = {
        name: value
        for name, value in vars(optimizer).items()
        if value is None or isinstance(value, (bool, int, float, str))
    }
    # A variable's value is read in each update; a schedule is traced.
    return {**plain, "learning_rate": id(optimizer._learning_rate)}


def copy_exclusions(
    source: keras.optimizers.Optimizer, target: keras.optimizers.Optimizer
) -> None:
    """Excludes the same variables from weight decay; no config names them."""
    for name in (_EXCLUDED, _EXCLUDED_NAMES):
        if hasattr(source, name):
            object.__setattr__(target, name, getattr(source, name))


def set_iterations(
    optimizer: keras.optimizers.Optimizer, iterations: int
) -> None:
    """Sets the number of updates that an optimizer has made."""
    # With accumulation, Keras counts calls, and divides when it reads the
    # count.
    steps = optimizer.gradient_accumulation_steps or 1
    optimizer._iterations.assign(iterations * steps)


def counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Returns the variable that counts an optimizer's calls."""
    # With accumulation, `iterations` is another number.
    return optimizer._iterations


def num_calls(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    """Returns how often an optimizer was called, with accumulation or not."""
    return tf.convert_to_tensor(counter(optimizer))


def learning_rate_at(
    optimizer: keras.optimizers.Optimizer, iterations: int
) -> float:
    """Returns the learning rate of the update after `iterations` updates."""
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return float(rate(iterations))
    # float() does not take a variable of a strategy.
    return float(tf.convert_to_tensor(optimizer.learning_rate))


def has_caller_of(kind: type, contains: Callable[[Any], bool]) -> bool:
    """Returns True if an optimizer of this `kind` is among the callers.

    An inner optimizer can find its wrappers only in `build`. The `build` of a
    LossScaleOptimizer or MultiOptimizer calls the `build` of its inner
    optimizers. A LossScaleOptimizer directly around an optimizer also sets the
    inner `loss_scale_factor`, so no search is needed.
    """
    found = (frame.f_locals.get("self") for frame in frames.callers())
    return any(isinstance(one, kind) and contains(one) for one in found)


def is_writing_legacy_file() -> bool:
    """Returns True if Keras is currently writing a legacy .h5 file."""
    # Keras's writer calls no method of an optimizer that only the writer calls.
    writer = "save_model_to_hdf5"
    return any(frame.f_code.co_name == writer for frame in frames.callers())
