"""Sums IndexedSlices over a group; the sums stay IndexedSlices."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import indexed_slices


def summed(
    slices: Sequence[tf.IndexedSlices], transport: transport_lib.Transport
) -> list[tf.IndexedSlices]:
    """Gathers a group's rows, and sums rows of the same index.

    The number of rows may differ by replica. The results' indices are unique.
    """
    if not slices:
        return []
    tensors = []
    for one in slices:
        # The receiving replica sums the rows in the gradient's own dtype.
        dtype = transport.communication.dtype_of_rows(one.dtype.name)
        tensors.append(tf.cast(one.values, dtype))
        tensors.append(tf.cast(one.indices, tf.int64))
    # Each variable has two tensors: its rows count as a variable, their indices
    # do not.
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
    """Returns IndexedSlices of a variable without any row."""
    return tf.IndexedSlices(
        tf.zeros([0, *variable.shape[1:]], dtype),
        tf.zeros([0], tf.int64),
        tf.constant(variable.shape.as_list(), tf.int64),
    )
