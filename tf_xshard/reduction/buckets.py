"""Communicates dense tensors, packed into buckets if the transport benefits.

A few large collectives are faster than many small ones, and several buckets in
flight overlap with the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import shards
from tf_xshard.reduction import wire

# Packing copies a tensor. In one process, copying a tensor of this many bytes
# takes longer than it saves. A sharded step of 12 million weights took 26% less
# time than plain Keras with 16 MiB buckets, and 39% less with 4 MB tensors that
# were not packed. Across processes, packing saves time. The sharded step took
# 17% less time than the unsharded step with buckets, and as much time without.
# Before quantization, packing would copy four times the bytes that are sent, so
# quantized tensors of this size are not packed, also across processes.
_BYTES_NOT_PACKED = 1 << 20


def sum_dense(
    tensors: Sequence[tf.Tensor], transport: transport_lib.Transport
) -> wire.Reduced:
    """Sums dense tensors over this replica's group."""
    if not tensors:
        return wire.Reduced([], None)
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    buckets = _buckets(tensors, sizes, transport)
    packed = [
        _packed(
            [tensors[i] for i in bucket],
            wire.padding(sum(sizes[i] for i in bucket), transport),
        )
        for bucket in buckets
    ]
    with recorder.labelled(counts=[len(bucket) for bucket in buckets]):
        sums, lost = wire.summed(packed, transport)

    def unpacked(bucket: Sequence[int], total: tf.Tensor) -> list[tf.Tensor]:
        total = tf.cast(total, tensors[bucket[0]].dtype)
        return _unpacked(total, [tensors[i].shape for i in bucket])

    return wire.Reduced(
        _in_order(buckets, sums, unpacked),
        lost and _in_order(buckets, lost, unpacked),
    )


def scatter_dense(
    tensors: Sequence[tf.Tensor],
    transport: transport_lib.Transport,
    counts: Sequence[int] | None = None,
) -> wire.Reduced:
    """Returns this replica's shards of the group sums of dense tensors.

    `counts` are the numbers of variables in the tensors; None for one each.
    """
    if not tensors:
        return wire.Reduced([], None)
    layouts = [
        shards.Layout(tuple(tensor.shape), transport.groups)
        for tensor in tensors
    ]
    rows = [
        layout.split(tensor)
        for layout, tensor in zip(layouts, tensors, strict=True)
    ]
    sizes = [one.num_elements for one in layouts]
    buckets = _buckets(tensors, sizes, transport, _bytes_not_packed(transport))
    packed = [_concatenated([rows[i] for i in b]) for b in buckets]
    with recorder.labelled(counts=_totals(counts, buckets)):
        sums, lost = wire.scattered(packed, transport)

    def split(bucket: Sequence[int], total: tf.Tensor) -> list[tf.Tensor]:
        total = tf.cast(total, tensors[bucket[0]].dtype)
        return _split(total, [layouts[i].size for i in bucket])

    return wire.Reduced(
        _in_order(buckets, sums, split),
        lost
        and [
            layout.join(one)
            for layout, one in zip(
                layouts, _in_order(buckets, lost, split), strict=True
            )
        ],
    )


def gather_dense(
    parts: Sequence[tf.Tensor],
    layouts: Sequence[shards.Layout],
    transport: transport_lib.Transport,
    counts: Sequence[int] | None = None,
) -> list[tf.Tensor]:
    """Joins the shards of a group's replicas; see `scatter_dense`.

    `transport` must communicate values unchanged.
    """
    if not parts:
        return []
    for part in parts:
        transport.check_dtype(part.dtype)
    sizes = [one.num_elements for one in layouts]
    buckets = _buckets(parts, sizes, transport, _bytes_not_packed(transport))
    packed = [_concatenated([parts[i] for i in b]) for b in buckets]
    with recorder.labelled("variables", counts=_totals(counts, buckets)):
        stacks = transport.all_gather(packed)

    def split(bucket: Sequence[int], stack: tf.Tensor) -> list[tf.Tensor]:
        return _split(stack, [layouts[i].size for i in bucket])

    return [
        layout.join(rows)
        for layout, rows in zip(
            layouts, _in_order(buckets, stacks, split), strict=True
        )
    ]


def _totals(counts: Sequence[int] | None, buckets: Sequence) -> list[int]:
    return [
        len(one) if counts is None else sum(counts[i] for i in one)
        for one in buckets
    ]


def _bytes_not_packed(transport: transport_lib.Transport) -> float:
    return _BYTES_NOT_PACKED if transport.site.num_processes == 1 else math.inf


def _buckets(
    tensors: Sequence[tf.Tensor],
    sizes: Sequence[int],
    transport: transport_lib.Transport,
    bytes_not_packed: float = math.inf,
) -> list[list[int]]:
    """Groups the positions of neighbors of one dtype into buckets."""
    if not transport.packs:
        return [[position] for position in range(len(tensors))]
    # The backward pass computes the last layers' gradients first. They are
    # communicated first, while the backward pass is still running.
    order = reversed(range(len(tensors)))
    buckets: list[list[int]] = []
    open_bucket: dict[tf.DType, tuple[list[int], int]] = {}
    num_bytes = [
        size * tensor.dtype.size
        for size, tensor in zip(sizes, tensors, strict=True)
    ]
    for position in order:
        dtype, size = tensors[position].dtype, num_bytes[position]
        if size >= bytes_not_packed:
            buckets.append([position])
            continue
        bucket, filled = open_bucket.get(dtype, ([], 0))
        limit = transport.communication.bytes_per_bucket
        if not bucket or filled + size > limit:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(position)
        open_bucket[dtype] = (bucket, filled + size)
    if not wire.is_quantized(transport):
        return buckets
    # Large tensors leave their bucket, but they count for its size.
    is_large = [size >= _BYTES_NOT_PACKED for size in num_bytes]
    divided: list[list[int]] = []
    for bucket in buckets:
        divided += [[i] for i in bucket if is_large[i]]
        divided.append([i for i in bucket if not is_large[i]])
    return [bucket for bucket in divided if bucket]


def _in_order(
    buckets: Sequence[Sequence[int]],
    packed: Sequence[tf.Tensor],
    unpacked: Callable[[Sequence[int], tf.Tensor], Sequence[tf.Tensor]],
) -> list[tf.Tensor]:
    """Unpacks the tensors of buckets; returns the parts by their positions."""
    found: dict[int, tf.Tensor] = {}
    for bucket, tensor in zip(buckets, packed, strict=True):
        found.update(zip(bucket, unpacked(bucket, tensor), strict=True))
    return [found[position] for position in range(len(found))]


def _packed(tensors: Sequence[tf.Tensor], num_zeros: int) -> tf.Tensor:
    """Concatenates flattened tensors and zeros; a lone tensor is unchanged."""
    if len(tensors) == 1 and not num_zeros:
        return tensors[0]
    parts = [tf.reshape(tensor, [-1]) for tensor in tensors]
    if num_zeros:
        parts.append(tf.zeros([num_zeros], parts[0].dtype))
    return tf.concat(parts, 0)


def _unpacked(
    total: tf.Tensor, shapes: Sequence[tf.TensorShape]
) -> list[tf.Tensor]:
    """Reverses `_packed`."""
    if len(shapes) == 1 and total.shape == shapes[0]:
        return [total]
    *parts, _ = tf.split(total, [*map(math.prod, shapes), -1])
    return [
        tf.reshape(part, shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]


def _concatenated(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, -1)


def _split(tensor: tf.Tensor, sizes: Sequence[int]) -> list[tf.Tensor]:
    return [tensor] if len(sizes) == 1 else tf.split(tensor, sizes, -1)
