"""Loads handwritten digits, and creates the model and its optimizers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

BATCH_SIZE = 64
NUM_VALIDATION = 357

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(4e-3),
    "adamw": lambda: keras.optimizers.AdamW(2e-3, weight_decay=0.01),
    "clipped": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, global_clipnorm=0.5
    ),
    "nadam": lambda: keras.optimizers.Nadam(2e-3),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-3),
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
}


@dataclasses.dataclass
class Digits:
    """Holds every batch of every epoch in order, and the validation data.

    Attributes:
      x: Images, float32 [num_epochs * steps_per_epoch * batch_size, 8, 8, 1].
      y: Digits of `x`, int32 [num_epochs * steps_per_epoch * batch_size].
      x_validation: Images, float32 [num_images, 8, 8, 1].
      y_validation: Digits of `x_validation`, int32 [num_images].
    """

    x: np.ndarray
    y: np.ndarray
    x_validation: np.ndarray
    y_validation: np.ndarray
    steps_per_epoch: int
    batch_size: int = BATCH_SIZE

    def of_shards(self, members: Sequence[int], num_replicas: int) -> Digits:
        """Returns the shards of each batch that some replicas get."""
        shard = self.batch_size // num_replicas
        by_replica = np.arange(len(self.x)).reshape(-1, num_replicas, shard)
        rows = by_replica[:, list(members)].reshape(-1)
        return dataclasses.replace(
            self,
            x=self.x[rows],
            y=self.y[rows],
            batch_size=shard * len(members),
        )

    def in_parts(self, num_parts: int) -> Digits:
        """Splits every batch into parts."""
        return dataclasses.replace(
            self,
            steps_per_epoch=self.steps_per_epoch * num_parts,
            batch_size=self.batch_size // num_parts,
        )


def load(epochs: int, seed: int) -> Digits:
    """Loads the 1,797 images in scikit-learn, without a download."""
    from sklearn import datasets

    digits = datasets.load_digits()
    x = (digits.images[..., np.newaxis] / 16.0).astype(np.float32)
    y = digits.target.astype(np.int32)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(x))
    train, validation = order[NUM_VALIDATION:], order[:NUM_VALIDATION]
    steps = len(train) // BATCH_SIZE
    rows = np.concatenate(
        [rng.permutation(train)[: steps * BATCH_SIZE] for _ in range(epochs)]
    )
    return Digits(x[rows], y[rows], x[validation], y[validation], steps)


def create_model(seed: int) -> keras.Model:
    """Creates a small convolutional classifier."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="gelu"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="gelu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def compile_arguments() -> dict[str, Any]:
    """Returns the loss and the metric of the demo."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"loss": loss, "metrics": ["accuracy"]}


def compiled(
    made: keras.Model, optimizer: keras.optimizers.Optimizer
) -> keras.Model:
    """Compiles a model as the demo does."""
    made.compile(optimizer=optimizer, **compile_arguments())
    return made


@functools.cache
def _evaluated(seed: int) -> keras.Model:
    """Creates one model for all weights, so that its step is traced once."""
    return compiled(create_model(seed), keras.optimizers.SGD())


def evaluate(
    weights: Sequence[np.ndarray], digits: Digits, seed: int
) -> list[float]:
    """Returns the validation loss and accuracy of weights, on one device."""
    made = _evaluated(seed)
    made.set_weights(weights)
    x = digits.x_validation
    return made.evaluate(x, digits.y_validation, batch_size=len(x), verbose=0)
