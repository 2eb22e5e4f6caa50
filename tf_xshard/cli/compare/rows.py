"""Sees, and may cut, the rows of the datasets that a script distributes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_xshard.cli.compare import patches
from tf_xshard.cli.compare import recording as recording_lib

# To reach the last batch of an epoch, the batches before it are made.
_MAX_SKIPPED = 1000


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


def _refuse_values(plain: Callable, *args: Any, **kwargs: Any) -> Any:
    """Refuses rows that can't be given to one replica."""
    if patches.is_called_by_script():
        raise patches.Refused(
            "The script calls experimental_distribute_values_from_function,"
            " whose rows can't be given to one replica. Use"
            " experimental_distribute_dataset."
        )
    return plain(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Epoch:
    """Describes the data that `fit` trains on.

    Attributes:
      batches_per_update: The number of batches that make an update.
      is_array: Whether it was passed arrays, whose batches can be counted.
    """

    batches_per_update: int
    is_array: bool


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
        # What `fit` says of the data that it distributes.
        self._epoch: Epoch | None = None

    @contextlib.contextmanager
    def of_epoch(self, epoch: Epoch | None) -> Iterator[None]:
        """Says what is distributed; None if `fit` counts steps itself."""
        self._epoch = epoch
        try:
            yield
        finally:
            self._epoch = None

    def changes(self) -> Iterator[patches.Patch]:
        """Yields the context managers that replace methods."""
        yield patches.around(
            tf.distribute.Strategy,
            "experimental_distribute_values_from_function",
            _refuse_values,
        )
        for method, argument, changed in (
            ("experimental_distribute_dataset", "dataset", self._of_dataset),
            (
                "distribute_datasets_from_function",
                "dataset_fn",
                self._of_function,
            ),
        ):
            yield patches.around_argument(
                tf.distribute.Strategy, method, argument, changed
            )

    def take_step(self, num_batches: int) -> int | None:
        """Notes what a step has trained on, and returns the number of rows."""
        latest = [passes[-1] for passes in self._recording.rows if passes]
        for one in latest:
            one.is_trained = True
        for one in latest:
            batches = one.batches[one.position :][:num_batches]
            if batches:
                one.position += num_batches
                return sum(map(len, batches))
        return None

    def _of_dataset(self, dataset: Any) -> Any:
        """Returns the dataset to distribute instead."""
        if not isinstance(dataset, tf.data.Dataset):
            return dataset
        if self._epoch is not None:
            dataset = self._first_and_last(dataset, self._epoch)
        return self._recorded(dataset, 1, 1)

    def _of_function(
        self, dataset_fn: Callable[[Any], Any]
    ) -> Callable[[Any], Any]:
        """Returns the function to distribute the datasets of instead."""
        number = self._settings.num_replicas
        all_replicas = self._settings.seen_replicas
        # In the run on one replica, a batch has the rows of all replicas.
        parts = all_replicas // number
        return lambda context: self._recorded(
            dataset_fn(context), number, parts, all_replicas
        )

    def _first_and_last(
        self, dataset: tf.data.Dataset, epoch: Epoch
    ) -> tf.data.Dataset:
        """Leaves out what is between the first batches and the last one.

        Only the last batch of an epoch may have fewer rows.
        """
        number = int(dataset.cardinality())
        if number < 0 and epoch.is_array:  # Slices, which cost nothing.
            number = int(dataset.reduce(0, lambda count, *_: count + 1))
        first = (self._settings.num_steps - 1) * epoch.batches_per_update
        if number <= first + 1:
            return dataset
        if number > _MAX_SKIPPED:
            self._recording.note(
                f"the last of {number} batches of an epoch was not tried"
            )
            return dataset
        self._recording.note(
            f"of an epoch of {number} batches, only the first {first} and the"
            " last"
        )

        # In one pass, so that a dataset is shuffled as often as without it.
        def is_kept(index: tf.Tensor, *element: Any) -> tf.Tensor:
            return (index < first) | (index == number - 1)

        def without_index(index: tf.Tensor, element: Any) -> Any:
            return element

        return dataset.enumerate().filter(is_kept).map(without_index)

    def _recorded(
        self,
        dataset: tf.data.Dataset,
        batches_per_step: int,
        parts: int,
        all_parts: int = 1,
    ) -> tf.data.Dataset:
        """Returns a dataset that notes its rows.

        Args:
          dataset: The batches.
          batches_per_step: How many of its batches make a step.
          parts: How many replicas' batches one of them has in the other run.
          all_parts: How many replicas share the rows that are kept.
        """
        passes: list[recording_lib.Pass] = []
        self._recording.rows.append(passes)
        waiting: list[list[list[int]]] = []
        rows = self._settings.rows
        kept = None if rows is None else max(1, rows // all_parts)
        if kept is not None or self._settings.permuted:
            for spec in tf.nest.flatten(dataset.element_spec):
                if (
                    not isinstance(spec, tf.TensorSpec)
                    or spec.shape.rank is None
                ):
                    raise patches.Refused(
                        f"A batch has {spec}, whose rows can't be cut or"
                        " reordered. Compare in float64, without --rows."
                    )

        def cut(component: Any) -> Any:
            if not isinstance(component, tf.Tensor) or not component.shape.rank:
                return component
            if component.dtype == tf.float32 and self._settings.floatx:
                # Keras casts what models get, and not the loop's own labels.
                component = tf.cast(component, self._settings.floatx)
            if kept is not None:
                size = tf.shape(component)[0] // parts
                component = tf.concat(
                    [
                        component[i * size : (i + 1) * size][:kept]
                        for i in range(parts)
                    ],
                    0,
                )
            return component[::-1] if self._settings.permuted else component

        is_tuple = type(dataset.element_spec) is tuple

        def start() -> np.int64:
            passes.append(recording_lib.Pass())
            waiting.append([])
            return np.int64(len(passes) - 1)

        def note(number: int, *arrays: np.ndarray) -> np.int64:
            waiting[number].append(_digests(arrays))
            if len(waiting[number]) == batches_per_step:
                batch = sorted(sum(waiting[number], []))
                passes[number].batches.append(batch)
                waiting[number].clear()
            return np.int64(0)

        def through(number: tf.Tensor, *element: Any) -> Any:
            element = tf.nest.map_structure(cut, element)
            arrays = tf.nest.flatten(element, expand_composites=True)
            seen = tf.numpy_function(note, [number, *arrays], tf.int64)
            with tf.control_dependencies([seen]):
                element = tf.nest.map_structure(tf.identity, element)
            return element if is_tuple else element[0]

        def one_pass(_: tf.Tensor) -> tf.data.Dataset:
            number = tf.numpy_function(start, [], tf.int64)
            return dataset.map(functools.partial(through, number))

        options = tf.data.Options()
        options.deterministic = True
        each = tf.data.Dataset.from_tensors(0).flat_map(one_pass)
        return each.with_options(options)
