"""Communicates dense tensors, packed into buckets if the transport benefits.

A few large collectives are faster than many small ones, and several buckets in
flight overlap with the backward pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_xshard import wire_formats
from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import shards
from tf_xshard.reduction import wire

# Packing copies a tensor. In one process, copying a tensor of this many bytes
# takes longer than it saves. A sharded step of 12 million weights took 26% less
# time than plain Keras with 16 MiB buckets, and 39% less with 4 MB tensors that
# were not packed. Across processes, packing saves time. The sharded step took
# 17% less time than the unsharded step with buckets, and as much time without.
# Large tensors are quantized before they are packed.
_BYTES_NOT_PACKED = 1 << 20


class Reduced(NamedTuple):
    """Holds reduced tensors, and the errors of this replica's tensors.

    `lost` is None without `Communication.error_feedback`.
    """

    values: list[tf.Tensor]
    lost: list[tf.Tensor] | None


def sum_dense(
    tensors: Sequence[tf.Tensor], transport: transport_lib.Transport
) -> Reduced:
    """Sums dense tensors over this replica's group."""
    if not tensors:
        return Reduced([], None)
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    buckets = _buckets(tensors, sizes, transport)
    packs = [_packs(bucket, tensors, sizes, transport) for bucket in buckets]

    def num_zeros(pack: Sequence[int]) -> int:
        return wire.padding(sum(sizes[i] for i in pack), transport)

    with recorder.labelled(counts=[len(bucket) for bucket in buckets]):
        sums, lost = wire.summed(
            [
                [_packed([tensors[i] for i in p], num_zeros(p)) for p in ps]
                for ps in packs
            ],
            transport,
        )

    def unpacked(totals: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        result: list[tf.Tensor] = [None] * len(tensors)
        for pack, total in zip(
            itertools.chain.from_iterable(packs), totals, strict=True
        ):
            total = tf.cast(total, tensors[pack[0]].dtype)
            shapes = [tensors[i].shape for i in pack]
            parts = _unpacked(total, shapes, num_zeros(pack))
            for i, part in zip(pack, parts, strict=True):
                result[i] = part
        return result

    return Reduced(unpacked(sums), lost and unpacked(lost))


def scatter_dense(
    tensors: Sequence[tf.Tensor],
    transport: transport_lib.Transport,
    counts: Sequence[int] | None = None,
) -> Reduced:
    """Returns this replica's shards of the group sums of dense tensors.

    `counts` are the numbers of variables in the tensors; None for one each.
    """
    if not tensors:
        return Reduced([], None)
    counts = counts or [1] * len(tensors)
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
    packs = [_packs(bucket, tensors, sizes, transport) for bucket in buckets]
    with recorder.labelled(counts=_totals(counts, buckets)):
        sums, lost = wire.scattered(
            [
                [_concatenated([rows[i] for i in p], 1) for p in ps]
                for ps in packs
            ],
            transport,
        )

    def split(totals: Sequence[tf.Tensor], axis: int) -> list[tf.Tensor]:
        result: list[tf.Tensor] = [None] * len(tensors)
        for pack, total in zip(
            itertools.chain.from_iterable(packs), totals, strict=True
        ):
            total = tf.cast(total, tensors[pack[0]].dtype)
            parts = _split(total, [layouts[i].size for i in pack], axis)
            for i, part in zip(pack, parts, strict=True):
                result[i] = part
        return result

    return Reduced(
        split(sums, 0),
        lost
        and [
            layout.join(one)
            for layout, one in zip(layouts, split(lost, 1), strict=True)
        ],
    )


def gather_dense(
    parts: Sequence[tf.Tensor],
    layouts: Sequence[shards.Layout],
    transport: transport_lib.Transport,
    counts: Sequence[int] | None = None,
) -> list[tf.Tensor]:
    """Joins the shards of a group's replicas; see `scatter_dense`."""
    if not parts:
        return []
    counts = counts or [1] * len(parts)
    for part in parts:
        transport.check_dtype(part.dtype)
    buckets = _buckets(
        parts,
        [one.num_elements for one in layouts],
        transport,
        _bytes_not_packed(transport),
    )
    packed = [
        _concatenated([parts[i] for i in bucket], 0) for bucket in buckets
    ]
    with recorder.labelled("variables", counts=_totals(counts, buckets)):
        stacks = transport.all_gather(packed)
    result: list[tf.Tensor] = [None] * len(parts)
    for bucket, stack in zip(buckets, stacks, strict=True):
        rows = _split(stack, [layouts[i].size for i in bucket], 1)
        for i, one in zip(bucket, rows, strict=True):
            result[i] = layouts[i].join(one)
    return result


def _totals(counts: Sequence[int], buckets: Sequence) -> list[int]:
    return [sum(counts[i] for i in bucket) for bucket in buckets]


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
    for position in order:
        dtype = tensors[position].dtype
        size = sizes[position] * dtype.size
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
    return buckets


def _packs(
    bucket: Sequence[int],
    tensors: Sequence[tf.Tensor],
    sizes: Sequence[int],
    transport: transport_lib.Transport,
) -> list[list[int]]:
    """Splits a bucket into lists of positions that are packed together.

    A large tensor is quantized alone; packing then copies a quarter of its
    bytes.
    """
    if not wire_formats.TABLE[transport.communication.dtype].is_quantized:
        return [list(bucket)]
    is_large = [
        sizes[i] * tensors[i].dtype.size >= _BYTES_NOT_PACKED for i in bucket
    ]
    small = [i for i, large in zip(bucket, is_large, strict=True) if not large]
    packs = [[i] for i, large in zip(bucket, is_large, strict=True) if large]
    return [*packs, small] if small else packs


def _packed(tensors: Sequence[tf.Tensor], num_zeros: int) -> tf.Tensor:
    """Concatenates flattened tensors and zeros; a lone tensor is unchanged."""
    if len(tensors) == 1 and not num_zeros:
        return tensors[0]
    parts = [tf.reshape(tensor, [-1]) for tensor in tensors]
    if num_zeros:
        parts.append(tf.zeros([num_zeros], parts[0].dtype))
    return tf.concat(parts, 0)


def _unpacked(
    total: tf.Tensor, shapes: Sequence[tf.TensorShape], num_zeros: int
) -> list[tf.Tensor]:
    """Reverses `_packed`."""
    if len(shapes) == 1 and total.shape == shapes[0]:
        return [total]
    sizes = [math.prod(shape) for shape in shapes]
    *parts, _ = tf.split(total, [*sizes, num_zeros])
    return [
        tf.reshape(part, shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]


def _concatenated(tensors: Sequence[tf.Tensor], axis: int) -> tf.Tensor:
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, axis)


def _split(tensor: tf.Tensor, sizes: Sequence[int], axis: int) -> list:
    return [tensor] if len(sizes) == 1 else tf.split(tensor, sizes, axis)
