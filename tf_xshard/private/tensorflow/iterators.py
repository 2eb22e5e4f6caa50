"""The input pipelines of a simulated TPU, so that its process can end."""

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
        # Iterators over distributed datasets: `_iterators` has one for each
        # host, whose `_iterator` has one for each device in
        # `_device_iterators`.
        "distributed": (
            "tensorflow.python.distribute.input_lib.DistributedIterator"
        ),
    },
)
names.attributes(
    _ITERATORS.feature, "_iterators", "_iterator", "_device_iterators"
)


def untuned(dataset: Any) -> Any:
    """A dataset without the thread that tunes its buffers.

    It sleeps for up to a minute, and a process that leaves an iterator
    unfinished waits for it at its end.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return dataset  # TensorFlow says what is wrong with it.
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


@functools.cache
def end_iterators_at_exit() -> None:
    """Makes unfinished iterators end with the process.

    Otherwise the threads that prefetch for their devices are waited for when
    TensorFlow is torn down.
    """
    atexit.register(_end_iterators)


def _end_iterators() -> None:
    for one in gc.get_objects():
        if not issubclass(type(one), _ITERATORS.distributed):
            continue
        for of_host in one._iterators:
            # The threads of the devices first: the host's wait for them.
            iterator = getattr(of_host, "_iterator", None)
            getattr(iterator, "_device_iterators", []).clear()
        one._iterators = []
