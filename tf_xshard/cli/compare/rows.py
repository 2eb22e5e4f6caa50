"""Sees, and may cut, the rows of the datasets that a script distributes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_xshard.cli.compare import recording as recording_lib


def _digests(arrays: tuple[np.ndarray, ...]) -> list[int]:
    """Returns a number for each row of a batch, of all of its components."""
    arrays = tuple(np.asarray(one) for one in arrays)
    sizes = {len(one) for one in arrays if one.ndim}
    number = sizes.pop() if len(sizes) == 1 else 1
    digests = []
    for row in range(number):
        digest = hashlib.blake2b(digest_size=8)
        for one in arrays:
            if one.ndim and number > 1:
                one = one[row]
            digest.update(
                repr(one.tolist()).encode()
                if one.dtype == object
                else np.ascontiguousarray(one).tobytes()
            )
        digests.append(int.from_bytes(digest.digest(), "big"))
    return digests


class Rows:
    """Maps every distributed dataset to one that records its rows.

    Args:
      settings: How many rows stay, and in which order.
      recording: Gets a list of batches for each dataset.
    """

    def __init__(
        self,
        settings: recording_lib.Settings,
        recording: recording_lib.Recording,
    ) -> None:
        self._settings = settings
        self._recording = recording
        # The number of updates that each batch makes a part of, while `fit`
        # distributes its data.
        self.batches_per_update: int | None = None

    def of_dataset(self, dataset: Any) -> Any:
        """Returns the dataset to distribute instead."""
        if not isinstance(dataset, tf.data.Dataset):
            return dataset
        if self.batches_per_update is not None:
            dataset = self._first_and_last(dataset)
        return self._recorded(dataset, 1)

    def of_function(
        self, dataset_fn: Callable[[Any], Any]
    ) -> Callable[[Any], Any]:
        """Returns the function to distribute the datasets of instead."""
        number = self._settings.num_replicas
        return lambda context: self._recorded(dataset_fn(context), number)

    def _first_and_last(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Leaves out what is between the first batches and the last one.

        Only the last batch of an epoch may have fewer rows.
        """
        number = int(dataset.cardinality())
        first = (self._settings.num_steps - 1) * self.batches_per_update
        if number <= first + 1:
            return dataset
        self._recording.note(
            f"of an epoch of {number} batches, the first {first} and the last"
        )
        return dataset.take(first).concatenate(dataset.skip(number - 1))

    def _recorded(
        self, dataset: tf.data.Dataset, batches_per_step: int
    ) -> tf.data.Dataset:
        batches: list[list[int]] = []
        self._recording.rows.append(batches)
        waiting: list[list[int]] = []

        def note(*arrays: np.ndarray) -> np.int64:
            waiting.append(_digests(arrays))
            if len(waiting) == batches_per_step:
                batches.append(sorted(sum(waiting, [])))
                waiting.clear()
            return np.int64(0)

        def through(*element: Any) -> Any:
            element = tf.nest.map_structure(self._cut, element)
            seen = tf.numpy_function(
                note, tf.nest.flatten(element, expand_composites=True), tf.int64
            )
            with tf.control_dependencies([seen]):
                element = tf.nest.map_structure(tf.identity, element)
            return element if len(element) > 1 else element[0]

        options = tf.data.Options()
        options.deterministic = True
        return dataset.map(through).with_options(options)

    def _cut(self, component: Any) -> Any:
        if not isinstance(component, tf.Tensor) or not component.shape.rank:
            return component
        component = component[: self._settings.rows]
        return component[::-1] if self._settings.permuted else component
