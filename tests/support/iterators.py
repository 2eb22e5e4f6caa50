"""tf.data's iterators, of which every `fit` makes three."""

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops


def without_autotuning():
    """Lets all iterators of this process end at once.

    The threads that tune tf.data's buffers end only after they have slept, for
    seconds at the end of many a `fit` on logical CPUs. Options of a dataset do
    not reach the iterators that TensorFlow makes for each device.
    `tf.data.experimental.enable_debug_mode` does, but then TensorFlow crashes
    now and then, when iterators of several devices end before their data.
    """
    # What adds the options of debug mode to every dataset with an iterator.
    dataset_ops.DatasetV2._apply_debug_options = _without_autotuning


def _without_autotuning(dataset):
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


if not hasattr(dataset_ops.DatasetV2, "_apply_debug_options"):
    raise ImportError(
        "This TensorFlow adds options to its datasets elsewhere; tests run "
        f"without {__name__}, but much longer."
    )
