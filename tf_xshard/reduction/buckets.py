"""Sums dense tensors, packed into buckets if the transport benefits.

A few large collectives are faster than many small ones, and several buckets in
flight overlap with the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tf_xshard.collectives import transport as transport_lib


def sum_dense(
    tensors: Sequence[tf.Tensor], transport: transport_lib.Transport
) -> list[tf.Tensor]:
    """The group sums of dense tensors.

    Args:
      tensors: This replica's tensors, of known shapes.
      transport: The `Transport` to use.

    Returns:
      The sums, in the order of `tensors` and in their dtypes.

    Raises:
      ValueError: If the transport cannot sum a dtype.
    """
    if not tensors:
        return []
    if not transport.packs:
        sums = transport.sum([_to_wire(t, transport) for t in tensors])
        return [
            tf.cast(total, tensor.dtype)
            for total, tensor in zip(sums, tensors, strict=True)
        ]
    # The backward pass computes the last layers' gradients first, so these are
    # communicated first, while it is still running.
    order = list(reversed(range(len(tensors))))
    buckets = _buckets(
        [tensors[i] for i in order], transport.communication.bytes_per_bucket
    )
    packed = [
        _to_wire(_packed([tensors[order[i]] for i in bucket]), transport)
        for bucket in buckets
    ]
    sums = transport.sum(packed)
    result: list[tf.Tensor] = [None] * len(tensors)
    for bucket, total in zip(buckets, sums, strict=True):
        members = [order[i] for i in bucket]
        total = tf.cast(total, tensors[members[0]].dtype)
        for i, part in zip(
            members,
            _unpacked(total, [tensors[i].shape for i in members]),
            strict=True,
        ):
            result[i] = part
    return result


def _to_wire(
    tensor: tf.Tensor, transport: transport_lib.Transport
) -> tf.Tensor:
    """Casts a tensor to the dtype in which it is summed."""
    dtype = transport.communication.dtype_of_sum(
        tensor.dtype.name, transport.groups.group_size
    )
    transport.check_dtype(tf.as_dtype(dtype))
    return tf.cast(tensor, dtype)


def _buckets(
    tensors: Sequence[tf.Tensor], bytes_per_bucket: int
) -> list[list[int]]:
    """Positions of neighbours of one dtype that fit into a bucket together."""
    buckets: list[list[int]] = []
    open_bucket: dict[tf.DType, tuple[list[int], int]] = {}
    for position, tensor in enumerate(tensors):
        size = tensor.shape.num_elements() * tensor.dtype.size
        bucket, filled = open_bucket.get(tensor.dtype, ([], 0))
        if not bucket or filled + size > bytes_per_bucket:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(position)
        open_bucket[tensor.dtype] = (bucket, filled + size)
    return buckets


def _packed(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """One tensor of rank 1; a single tensor is returned unchanged."""
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def _unpacked(
    total: tf.Tensor, shapes: Sequence[tf.TensorShape]
) -> list[tf.Tensor]:
    """Reverses `_packed`."""
    if len(shapes) == 1:
        return [total]
    parts = tf.split(total, [math.prod(shape) for shape in shapes])
    return [
        tf.reshape(part, shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]
