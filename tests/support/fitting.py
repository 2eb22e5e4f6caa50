"""`fit` for tests whose subject is not the input: tf.data tunes no buffers."""

import tensorflow as tf

from tests.support import group_training


def untuned(dataset):
    """A dataset that ends as soon as training does.

    tf.data's tuning threads sleep, and what ends waits for them: seconds after
    each `fit` on several logical CPUs, and up to a minute after a longer one.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def batches(x, y, batch_size=16):
    """A dataset of batches that ends as soon as `fit` does."""
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return untuned(dataset.batch(batch_size))


def fit(model, callbacks, epochs=2, xy=None, batch_size=16, **options):
    """The history of training on `group_training.data`, in one order."""
    return model.fit(
        batches(*(xy or group_training.data()), batch_size),
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        **options,
    ).history
