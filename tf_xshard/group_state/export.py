"""Saves a group as an ordinary `.keras` model."""

from __future__ import annotations

import collections
import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard.group_state import evaluate
from tf_xshard.group_state import inventory
from tf_xshard.group_state import replica_io
from tf_xshard.optimizers import stack
from tf_xshard.private.keras import fit_internals


def export(
    model: keras.Model,
    catalog: inventory.Catalog,
    replicas: replica_io.ReplicaValues,
    group: int,
    path: str | os.PathLike,
) -> None:
    """See `GroupState.export`."""
    path = os.fspath(path)
    if not path.endswith(".keras"):
        raise ValueError(f"export() writes .keras files, got {path!r}.")
    members = catalog.groups.to_list()[group]

    def value_of(variable: Any) -> np.ndarray:
        [value] = replicas.of_group([variable], members)
        return value

    def write() -> None:
        if replicas.rank == 0:
            _save(plain, path)

    evaluated = evaluate.GroupEvaluation(model, catalog, replicas)
    with (
        evaluated.with_weights_of(group),
        with_plain_optimizer(model, value_of) as plain,
    ):
        replicas.run_on_all_processes(f"Exporting to {path!r}", write)


def _save(model: keras.Model, path: str) -> None:
    """Replaces a file once the new file is complete; leaves no partial file."""
    new = f"{path}.unfinished.keras"
    try:
        model.save(new)
        tf.io.gfile.rename(new, path, overwrite=True)
    except BaseException:
        if tf.io.gfile.exists(new):
            tf.io.gfile.remove(new)
        raise


@contextlib.contextmanager
def with_plain_optimizer(
    model: keras.Model, value_of: Callable[[Any], np.ndarray]
) -> Iterator[keras.Model]:
    """Compiles a model without tf_xshard's wrappers inside a `with` block."""
    optimizer = getattr(model, "optimizer", None)
    config = model.get_compile_config() if optimizer is not None else None
    if not config or not stack.is_wrapper(optimizer):
        yield model
        return
    innermost = _unwrapped(optimizer)
    config["optimizer"] = keras.saving.serialize_keras_object(innermost)
    config["loss"] = _without_global_means(config.get("loss"))
    # Some optimizers' from_config pops from the dict that it gets.
    plain = keras.saving.deserialize_keras_object(
        copy.deepcopy(config["optimizer"])
    )
    if innermost.built:
        plain.build(model.trainable_variables)
        for mine, its in _paired(innermost, plain):
            its.assign(value_of(mine))
    with fit_internals.compiled_with(model, plain, config):
        yield model


def _without_global_means(config: Any) -> Any:
    """Replaces each GlobalMean in a config by the loss that it wraps."""
    if isinstance(config, dict):
        if config.get("registered_name") == "tf_xshard>GlobalMean":
            return config["config"]["loss"]
        return {k: _without_global_means(v) for k, v in config.items()}
    if isinstance(config, (list, tuple)):
        return type(config)(map(_without_global_means, config))
    return config


def _paired(optimizer: Any, other: Any) -> Iterator[tuple]:
    """Pairs the variables of two optimizers of one class."""
    # Pair them by name, since layers may have been frozen after the first
    # optimizer was built. The exported optimizer must fit the model as it is.
    by_name = collections.defaultdict(list)
    for variable in inventory.of_optimizer(optimizer):
        by_name[_last(variable)].append(variable)
    for variable in inventory.of_optimizer(other):
        if by_name[_last(variable)]:
            yield by_name[_last(variable)].pop(0), variable


def _last(variable: Any) -> str:
    return variable.path.split("/")[-1]


def _unwrapped(optimizer: Any) -> keras.optimizers.Optimizer:
    """Returns the innermost optimizer, which updates the model."""
    while stack.is_wrapper(optimizer):
        optimizer = getattr(
            optimizer, "local_optimizer", optimizer.inner_optimizer
        )
    return optimizer
