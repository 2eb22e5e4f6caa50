"""The group sums of IndexedSlices, which stay IndexedSlices."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import indexed_slices


def summed(
    slices: Sequence[tf.IndexedSlices], transport: transport_lib.Transport
) -> list[tf.IndexedSlices]:
    """Gathers the rows of a group and sums those of one index.

    The number of rows may differ by replica. Each index occurs once in the
    result.
    """
    if not slices:
        return []
    tensors = []
    for one in slices:
        # Rows are summed on the receiving replica, in their own dtype.
        dtype = transport.communication.dtype_of_rows(one.dtype.name)
        tensors.append(tf.cast(one.values, dtype))
        tensors.append(tf.cast(one.indices, tf.int64))
    # For each variable its rows and their indices.
    with recorder.labelled(counts=[1, 0] * len(slices)):
        gathered = transport.gather(tensors)
    return [
        indexed_slices.unique(
            tf.IndexedSlices(
                tf.cast(values, one.dtype),
                tf.cast(indices, one.indices.dtype),
                one.dense_shape,
            )
        )
        for one, values, indices in zip(
            slices, gathered[::2], gathered[1::2], strict=True
        )
    ]


def without_rows(variable: tf.Variable, dtype: str | None) -> tf.IndexedSlices:
    """IndexedSlices of a variable that have no row."""
    return tf.IndexedSlices(
        tf.zeros([0, *variable.shape[1:]], dtype),
        tf.zeros([0], tf.int64),
        tf.constant(variable.shape.as_list(), tf.int64),
    )
