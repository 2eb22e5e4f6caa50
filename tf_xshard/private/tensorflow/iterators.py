"""Lets a process with input pipelines of a simulated TPU end."""

from __future__ import annotations

import atexit
import functools
import gc
from typing import Any

import tensorflow as tf

from tf_xshard.private import names

# Present in TensorFlow 2.20 to 2.22.
_ITERATORS = names.PrivateNames(
    "tf_xshard.testing.simulated_tpu_strategy()",
    {
        # An iterator over a distributed dataset. Its `_iterators` has an object
        # for each host, whose `_iterator` has an iterator for each device in
        # `_device_iterators`.
        "distributed": (
            "tensorflow.python.distribute.input_lib.DistributedIterator"
        ),
        # Makes the dataset that prefetches for one device, and which the
        # user's options do not reach.
        "module": "tensorflow.python.data.ops.multi_device_iterator_ops",
        "device_dataset": (
            "tensorflow.python.data.ops.multi_device_iterator_ops."
            "_create_device_dataset"
        ),
    },
)
names.attributes(
    _ITERATORS.feature, "_iterators", "_iterator", "_device_iterators"
)


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


@functools.cache
def end_iterators_at_exit() -> None:
    """Makes unfinished iterators end with the process.

    Otherwise TensorFlow, when it is torn down, waits for the threads that
    prefetch for devices.
    """
    device_dataset = _ITERATORS.device_dataset

    # A thread tunes each device's buffer, although its size is fixed. The
    # process would wait for these threads, one after another. From here on,
    # this holds for all strategies of the process, not for the simulated TPU
    # alone: the function gets nothing that tells them apart.
    @functools.wraps(device_dataset)
    def untuned_device_dataset(*args: Any, **kwargs: Any) -> Any:
        return untuned(device_dataset(*args, **kwargs))

    _ITERATORS.module._create_device_dataset = untuned_device_dataset
    atexit.register(_end_iterators)


def _end_iterators() -> None:
    for one in gc.get_objects():
        if not issubclass(type(one), _ITERATORS.distributed):
            continue
        for of_host in one._iterators:
            # End the devices' threads first, since the host's threads wait for
            # them.
            iterator = getattr(of_host, "_iterator", None)
            getattr(iterator, "_device_iterators", []).clear()
        one._iterators = []
