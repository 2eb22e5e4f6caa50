"""Group sums of which 8-bit integers are sent.

rows of this replica, one for each of its group
  quantize, all-to-all        its row of all replicas
  sum in float32              the sum's row at its position
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
    """How many zeros a tensor must end with to be added up by `summed`."""
    row_size = quantization.blocks_for(-(-num_elements // group_size)).row_size
    return group_size * row_size - num_elements


def scattered(
    buckets: Sequence[Sequence[tf.Tensor]], transport: transport_lib.Transport
) -> tuple[list[tf.Tensor], Lost]:
    """The rows of group sums at this replica's position in its group.

    Args:
      buckets: This replica's tensors, of shapes [group_size, size]; those of a
        bucket are sent together.
      transport: The `Transport` to use.

    Returns:
      For each tensor, in order, one of shape [size], float32, and what was lost
      of it; None without error feedback.

    Raises:
      ValueError: If the transport has no all-to-all.
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
    """The group sums of tensors."""
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
    # What is lost of a sum is lost once: its owner adds it to its next part.
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
    """`scattered`, of rows that consist of whole blocks."""
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
    """One tensor for each bucket."""
    rest = iter(tensors)
    return [
        tf.concat(list(itertools.islice(rest, count)), 1) for count in counts
    ]


def _apart(
    buckets: Sequence[tf.Tensor],
    tensors: Sequence[tf.Tensor],
    counts: Sequence[int],
) -> list[tf.Tensor]:
    """Reverses `_together`; `tensors` are those that were put together."""
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
    """Whether XLA compiles the arithmetic: on CPUs, where that was measured."""
    return "CPU" in transport.site.device and not tf.executing_eagerly()
