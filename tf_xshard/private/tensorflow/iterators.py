"""Lets a process with input pipelines of a simulated TPU end."""

from __future__ import annotations

import atexit
import functools
import weakref
from typing import Any

import tensorflow as tf

from tf_xshard.private import names

# Present in TensorFlow 2.20 to 2.22. An iterator over a distributed dataset
# has in `_iterators` an object for each host, whose `_iterator` has an iterator
# for each of its `_devices` in `_device_iterators`. Each of these has its
# `_dataset`, which prefetches for the device.
names.attributes(
    "tf_xshard.testing.simulated_tpu_strategy()",
    *("_iterators", "_iterator", "_devices", "_device_iterators", "_dataset"),
)

_distributed_iterators: weakref.WeakSet = weakref.WeakSet()


def untuned(dataset: Any) -> Any:
    """Returns a dataset without the thread that tunes its buffers.

    The thread sleeps for up to a minute. A process that leaves an iterator
    unfinished waits at its end for the thread.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return dataset  # TensorFlow raises an error for it.
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def end_with_process(distributed_dataset: Any) -> Any:
    """Makes unfinished iterators over a distributed dataset end at exit.

    Otherwise TensorFlow, when it is torn down, waits for the threads that
    prefetch for devices.
    """
    kind: Any = type(distributed_dataset)
    distributed_dataset.__class__ = _untuning_subclass(kind)
    return distributed_dataset


@functools.cache
def _untuning_subclass(base: Any) -> type:
    class Dataset(base):
        def __iter__(self) -> Any:
            iterator = super().__iter__()
            for of_host in iterator._iterators:
                _untune_devices(of_host._iterator)
            _distributed_iterators.add(iterator)
            return iterator

    Dataset.__name__ = base.__name__
    Dataset.__qualname__ = base.__qualname__
    return Dataset


def _untune_devices(iterator: Any) -> None:
    """Replaces the iterator of each device by one without a tuning thread.

    The user's options do not reach the devices' datasets, whose buffers have
    a fixed size.
    """
    of_devices = iterator._device_iterators
    for index, device in enumerate(iterator._devices):
        # The iterator that is replaced has not started a thread yet.
        with tf.device(device):
            of_devices[index] = iter(untuned(of_devices[index]._dataset))


@atexit.register
def _end_iterators() -> None:
    for iterator in _distributed_iterators:
        for of_host in iterator._iterators:
            # End the devices' threads first, since the host's threads wait for
            # them.
            of_host._iterator._device_iterators.clear()
        iterator._iterators = []
