"""Group sums of which 8-bit integers are sent.

rows of this replica, one for each of its group
  quantize, all-to-all        its row of all replicas
  sum in float32              the sum's row at its position
  quantize, all-gather        all rows of the sum, the same bits on all replicas
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.reduction import quantization

Lost = list[tf.Tensor] | None


def padding(num_elements: int, group_size: int) -> int:
    """How many zeros a tensor must end with to be added up by `summed`.

    Args:
      num_elements: Its number of elements.
      group_size: The number of replicas in a group.

    Returns:
      An int.
    """
    row_size = quantization.blocks_for(-(-num_elements // group_size)).row_size
    return group_size * row_size - num_elements


def scattered(
    rows: Sequence[tf.Tensor], transport: transport_lib.Transport
) -> tuple[list[tf.Tensor], Lost]:
    """The rows of group sums at this replica's position in its group.

    Args:
      rows: This replica's tensors, of shapes [group_size, size].
      transport: The `Transport` to use.

    Returns:
      Tensors of shapes [size], float32, and what was lost of `rows`; None
      without error feedback.

    Raises:
      ValueError: If the transport has no all-to-all.
    """
    sizes = [one.shape[1] for one in rows]
    padded = [
        tf.pad(one, [[0, 0], [0, padding(size, 1)]])
        if padding(size, 1)
        else one
        for one, size in zip(rows, sizes, strict=True)
    ]
    sums, lost = _scattered(padded, transport)
    if lost is not None:
        lost = [one[:, :size] for one, size in zip(lost, sizes, strict=True)]
    return [one[:size] for one, size in zip(sums, sizes, strict=True)], lost


def summed(
    tensors: Sequence[tf.Tensor], transport: transport_lib.Transport
) -> tuple[list[tf.Tensor], Lost]:
    """The group sums of tensors.

    Args:
      tensors: This replica's tensors, with `padding` zeros at the end.
      transport: The `Transport` to use.

    Returns:
      Tensors of rank 1, float32, and what was lost of `tensors`; None without
      error feedback.

    Raises:
      ValueError: If the transport has no all-to-all.
    """
    group_size = transport.groups.group_size
    parts, lost = _scattered(
        [tf.reshape(one, [group_size, -1]) for one in tensors], transport
    )
    sent, lost_of_sums = _quantized(
        [one[tf.newaxis] for one in parts], transport
    )
    with recorder.labelled(dtype="int8"):
        stacks = transport.all_gather([one[0] for one in sent])
    totals = [
        quantization.dequantized(
            stack,
            quantization.blocks_for(part.shape[0]),
            fused=_is_fused(transport),
        )
        for stack, part in zip(stacks, parts, strict=True)
    ]
    totals = [tf.reshape(one, [-1]) for one in totals]
    if lost is None or lost_of_sums is None:
        return totals, None
    # What is lost of a sum is lost once: its owner adds it to its next part.
    own = transport.position()
    return totals, [
        tf.reshape(
            tf.concat(
                [one[:own], one[own : own + 1] + of_sum, one[own + 1 :]], 0
            ),
            [-1],
        )
        for one, of_sum in zip(lost, lost_of_sums, strict=True)
    ]


def _scattered(
    rows: Sequence[tf.Tensor], transport: transport_lib.Transport
) -> tuple[list[tf.Tensor], Lost]:
    """`scattered`, of rows that consist of whole blocks."""
    sent, lost = _quantized(rows, transport)
    with recorder.labelled(dtype="int8"):
        received = transport.all_to_all(sent)
    sums = [
        quantization.summed(
            one,
            quantization.blocks_for(own.shape[1]),
            fused=_is_fused(transport),
        )
        for one, own in zip(received, rows, strict=True)
    ]
    return sums, lost


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
    return "CPU" in transport.here.device and not tf.executing_eagerly()
