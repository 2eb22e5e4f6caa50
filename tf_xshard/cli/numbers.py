"""Trains a model on one device and under a strategy, and compares weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard.distribute import replica_variables

# Of a weight, in float64: 66 steps of Adam differ by 3e-15, and a wrong
# reduction by 1e-1.
TOLERANCE = 1e-9
Wrap = Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer]


@contextlib.contextmanager
def double_precision(strategy: tf.distribute.Strategy) -> Iterator[float]:
    """Makes models float64, and yields the difference that counts as equal.

    TPUs have no float64 and multiply float32 as bfloat16, while the one device
    is a CPU: there, it yields infinity.
    """
    if isinstance(strategy, tf.distribute.TPUStrategy):
        yield float("inf")
        return
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield TOLERANCE
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished run.

    Attributes:
      model: The trained model.
      start: The weights before the first step.
      weights: The weights of each replica, as `weights[replica][variable]`.
      history: What `fit` has returned.
    """

    model: keras.Model
    start: list[np.ndarray]
    weights: list[list[np.ndarray]]
    history: dict[str, list[float]]

    def moved(self, replica_id: int = 0) -> float:
        """Returns the largest change of a weight on a replica."""
        return difference(self.weights[replica_id], self.start)


def unwrapped(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.Optimizer:
    """Returns the optimizer itself, for runs of plain Keras."""
    return optimizer


def trained(
    create_model: Callable[[], keras.Model],
    optimizer: Callable[[], keras.optimizers.Optimizer],
    dataset: tf.data.Dataset,
    strategy: tf.distribute.Strategy | None = None,
    wrap: Wrap = unwrapped,
    train_step: Callable[..., Any] | None = None,
    callbacks: Iterable[Callable[..., keras.callbacks.Callback]] = (),
    compiled: Any = None,
    **fitted: Any,
) -> Trained:
    """Trains a new model.

    Args:
      create_model: Returns it, always with the same weights.
      optimizer: Returns the inner optimizer.
      dataset: The global batches.
      strategy: None for one device.
      wrap: Returns the optimizer to compile.
      train_step: Takes the place of the model's.
      callbacks: Each gets the model and the strategy.
      compiled: Further arguments of `compile`.
      **fitted: Further arguments of `fit`.
    """
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = create_model()
        if train_step:
            model.train_step = functools.partial(train_step, model)
        model.compile(wrap(optimizer()), **compiled)
        model.optimizer.build(model.trainable_variables)
    start = model.get_weights()
    options = tf.data.Options()
    options.autotune.enabled = False  # `fit` would wait for its threads.
    history = model.fit(
        dataset.with_options(options),
        shuffle=False,
        callbacks=[one(model, strategy) for one in callbacks],
        **fitted,
    ).history
    of_variables = [
        [np.array(one) for one in replica_variables.copies(variable)]
        for variable in model.weights
    ]
    weights = [list(one) for one in zip(*of_variables, strict=True)]
    return Trained(model, start, weights, history)


def difference(
    some: Sequence[np.ndarray], others: Sequence[np.ndarray]
) -> float:
    """Returns the largest difference between two lists of weights."""
    # np.max keeps a nan, which max can drop.
    return float(
        np.max([np.abs(a - b).max() for a, b in zip(some, others, strict=True)])
    )


def deviation(
    weights: Sequence[Sequence[np.ndarray]],
    reference: Sequence[np.ndarray],
    members: Iterable[int] | None = None,
) -> float:
    """Returns the largest difference of replicas' weights from a reference."""
    members = range(len(weights)) if members is None else members
    return float(np.max([difference(weights[r], reference) for r in members]))
