"""Gradients of which some are dense, some sparse and some missing.

Each replica of a group may hold another kind for the same variable. What is
communicated for it is dense if any replica holds a dense gradient, or if the
transport only sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import indexed_slices
from tf_xshard.reduction import negotiation


def combined(
    gradients: Sequence,
    variables: Sequence,
    patterns: Sequence[negotiation.Pattern],
    transport: transport_lib.Transport,
    of_dense: Callable[[list[tf.Tensor], list], list],
    of_sparse: Callable[[list[tf.IndexedSlices], list], list],
) -> list:
    """Combines the gradients that any participating replica has.

    Args:
      gradients: This replica's gradients: tensors of the variables' shapes,
        IndexedSlices or None.
      variables: The variables.
      patterns: What each participating replica holds.
      transport: The `Transport` to use.
      of_dense: Combines tensors over the group, given these and their
        variables.
      of_sparse: Combines IndexedSlices, whose group sums it is given, and
        their variables.

    Returns:
      One value per variable, None where no participating replica has a
      gradient.
    """
    dense: list[int] = []
    sparse: list[int] = []
    for index in range(len(variables)):
        kinds = negotiation.kinds(patterns, index)
        if kinds == {negotiation.NONE}:
            continue
        is_sparse = negotiation.DENSE not in kinds and transport.gathers
        (sparse if is_sparse else dense).append(index)
    dtypes = [
        next((entry[i][1] for entry in patterns if entry[i][1]), None)
        for i in range(len(variables))
    ]
    result = [None] * len(variables)
    of_dense_ones = of_dense(
        [_as_dense(gradients[i], variables[i], dtypes[i]) for i in dense],
        [variables[i] for i in dense],
    )
    of_sparse_ones = of_sparse(
        _sum_sparse(
            [_as_sparse(gradients[i], variables[i], dtypes[i]) for i in sparse],
            transport,
        ),
        [variables[i] for i in sparse],
    )
    for index, value in zip(
        dense + sparse, of_dense_ones + of_sparse_ones, strict=True
    ):
        result[index] = value
    return result


def _as_dense(gradient: Any, variable: Any, dtype: str | None) -> tf.Tensor:
    if gradient is None:
        return tf.zeros(variable.shape, dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return indexed_slices.dense(gradient, variable)
    return gradient


def _as_sparse(
    gradient: Any, variable: Any, dtype: str | None
) -> tf.IndexedSlices:
    if gradient is None:
        return tf.IndexedSlices(
            tf.zeros([0, *variable.shape[1:]], dtype),
            tf.zeros([0], tf.int64),
            tf.constant(variable.shape.as_list(), tf.int64),
        )
    return gradient


def _sum_sparse(
    slices: Sequence[tf.IndexedSlices], transport: transport_lib.Transport
) -> list[tf.IndexedSlices]:
    """The group sums of IndexedSlices, with unique indices."""
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
