"""Sums tensors over a group by sending 8-bit integers.

this replica's rows           one row for each replica of the group
  quantize, all-to-all        each replica's row at this replica's position
  sum in float32              the sum's row at this position
  quantize, all-gather        all rows of the sum, the same bits on all replicas
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tensorflow as tf

from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.reduction import quantization

Lost = list[tf.Tensor] | None


def padding(num_elements: int, group_size: int) -> int:
    """Returns how many zeros a tensor must end with for `summed`."""
    row_size = quantization.blocks_for(-(-num_elements // group_size)).row_size
    return group_size * row_size - num_elements


def scattered(
    buckets: Sequence[Sequence[tf.Tensor]], transport: transport_lib.Transport
) -> tuple[list[tf.Tensor], Lost]:
    """Returns the rows of group sums at this replica's position in its group.

    The tensors of a bucket, of shapes [group_size, size], are sent together.
    Returns float32 sums of shapes [size], and what each tensor lost, or None
    without error feedback. Raises ValueError if `transport` has no all-to-all.
    """
    sizes = [one.shape[1] for bucket in buckets for one in bucket]
    sums, lost = _scattered(
        [[_whole_blocks(one) for one in bucket] for bucket in buckets],
        transport,
    )
    if lost is not None:
        lost = [one[:, :size] for one, size in zip(lost, sizes, strict=True)]
    return [one[:size] for one, size in zip(sums, sizes, strict=True)], lost


def _whole_blocks(rows: tf.Tensor) -> tf.Tensor:
    num_zeros = padding(rows.shape[1], 1)
    return tf.pad(rows, [[0, 0], [0, num_zeros]]) if num_zeros else rows


def summed(
    buckets: Sequence[Sequence[tf.Tensor]], transport: transport_lib.Transport
) -> tuple[list[tf.Tensor], Lost]:
    """Sums tensors over the group; see `padding` for their size."""
    group_size = transport.groups.group_size
    sums, lost = _scattered(
        [
            [tf.reshape(one, [group_size, -1]) for one in bucket]
            for bucket in buckets
        ],
        transport,
    )
    sent, lost_of_sums = _quantized(
        [one[tf.newaxis] for one in sums], transport
    )
    counts = [len(bucket) for bucket in buckets]
    with recorder.labelled(dtype="int8"):
        stacks = transport.all_gather(
            [one[0] for one in _together(sent, counts)]
        )
    totals = [
        tf.reshape(
            quantization.dequantized(
                stack,
                quantization.blocks_for(own.shape[0]),
                fused=_is_fused(transport),
            ),
            [-1],
        )
        for stack, own in zip(_apart(stacks, sent, counts), sums, strict=True)
    ]
    if lost is None or lost_of_sums is None:
        return totals, None
    # Only the replica that quantized a row of the sum carries that row's loss.
    # Otherwise the next sum would contain the loss several times.
    own = tf.one_hot(transport.position(), group_size)[:, tf.newaxis]
    add = (
        quantization.compiled(_added_row)
        if _is_fused(transport)
        else _added_row
    )
    return totals, [
        tf.reshape(add(one, of_sum, own), [-1])
        for one, of_sum in zip(lost, lost_of_sums, strict=True)
    ]


def _added_row(
    rows: tf.Tensor, row: tf.Tensor, is_there: tf.Tensor
) -> tf.Tensor:
    return rows + is_there * row


def _scattered(
    buckets: Sequence[Sequence[tf.Tensor]], transport: transport_lib.Transport
) -> tuple[list[tf.Tensor], Lost]:
    """Does what `scattered` does, for rows that consist of whole blocks."""
    tensors = [one for bucket in buckets for one in bucket]
    counts = [len(bucket) for bucket in buckets]
    sent, lost = _quantized(tensors, transport)
    with recorder.labelled(dtype="int8"):
        received = transport.all_to_all(_together(sent, counts))
    sums = [
        quantization.summed(
            one,
            quantization.blocks_for(own.shape[1]),
            fused=_is_fused(transport),
        )
        for one, own in zip(
            _apart(received, sent, counts), tensors, strict=True
        )
    ]
    return sums, lost


def _together(
    tensors: Sequence[tf.Tensor], counts: Sequence[int]
) -> list[tf.Tensor]:
    """Concatenates the tensors of each bucket."""
    rest = iter(tensors)
    return [
        tf.concat(list(itertools.islice(rest, count)), 1) for count in counts
    ]


def _apart(
    buckets: Sequence[tf.Tensor],
    tensors: Sequence[tf.Tensor],
    counts: Sequence[int],
) -> list[tf.Tensor]:
    """Splits `buckets` into tensors of the sizes of `tensors`."""
    rest = iter(tensors)
    return [
        part
        for bucket, count in zip(buckets, counts, strict=True)
        for part in tf.split(
            bucket, [one.shape[1] for one in itertools.islice(rest, count)], 1
        )
    ]


def _quantized(
    rows: Sequence[tf.Tensor], transport: transport_lib.Transport
) -> tuple[list[tf.Tensor], Lost]:
    results = [
        quantization.quantized(
            tf.cast(one, tf.float32),
            quantization.blocks_for(one.shape[1]),
            transport.communication.rounding,
            keeps_lost=transport.communication.error_feedback,
            fused=_is_fused(transport),
        )
        for one in rows
    ]
    lost = None
    if transport.communication.error_feedback:
        lost = [one for _, one in results if one is not None]
    return [one for one, _ in results], lost


def _is_fused(transport: transport_lib.Transport) -> bool:
    """Returns True if XLA compiles the arithmetic."""
    # The compiled arithmetic was measured on CPUs only.
    return "CPU" in transport.site.device and not tf.executing_eagerly()
