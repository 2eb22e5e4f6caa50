"""Packed tensors -> their sums, in the dtype in which they communicate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_xshard import wire_formats
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.reduction import quantized_sum


class Received(NamedTuple):
    """What a group has added up.

    Attributes:
      sums: A tensor for each that was communicated.
      lost: What was lost of this replica's tensors, one for each; None without
        `Communication.error_feedback`.
    """

    sums: list[tf.Tensor]
    lost: list[tf.Tensor] | None


def padding(num_elements: int, transport: transport_lib.Transport) -> int:
    """How many zeros a tensor must end with to be added up by `summed`."""
    if not wire_formats.TABLE[transport.communication.dtype].is_quantized:
        return 0
    return quantized_sum.padding(num_elements, transport.groups.group_size)


def summed(
    buckets: Sequence[Sequence[tf.Tensor]], transport: transport_lib.Transport
) -> Received:
    """The group sums of tensors, which end with `padding` zeros.

    A bucket has one tensor unless the format is quantized.
    """
    if wire_formats.TABLE[transport.communication.dtype].is_quantized:
        return Received(*quantized_sum.summed(buckets, transport))
    tensors = [tensor for [tensor] in buckets]
    sent = [_cast(tensor, transport) for tensor in tensors]
    return Received(
        transport.sum(sent), _lost_by_cast(tensors, sent, transport)
    )


def scattered(
    buckets: Sequence[Sequence[tf.Tensor]], transport: transport_lib.Transport
) -> Received:
    """The rows of group sums at this replica's position in its group.

    Args:
      buckets: This replica's tensors, of shapes [group_size, size]. A bucket
        has one unless the format is quantized.
      transport: The `Transport` to use.

    Returns:
      `Received`, with sums of shapes [size].

    Raises:
      ValueError: If the transport cannot sum a dtype.
    """
    if wire_formats.TABLE[transport.communication.dtype].is_quantized:
        return Received(*quantized_sum.scattered(buckets, transport))
    rows = [tensor for [tensor] in buckets]
    sent = [_cast(tensor, transport) for tensor in rows]
    return Received(
        transport.reduce_scatter(sent), _lost_by_cast(rows, sent, transport)
    )


def _cast(tensor: tf.Tensor, transport: transport_lib.Transport) -> tf.Tensor:
    dtype = transport.communication.dtype_of_sum(
        tensor.dtype.name, transport.groups.group_size
    )
    transport.check_dtype(tf.as_dtype(dtype))
    return tf.cast(tensor, dtype)


def _lost_by_cast(
    tensors: Sequence[tf.Tensor],
    sent: Sequence[tf.Tensor],
    transport: transport_lib.Transport,
) -> list[tf.Tensor] | None:
    if not transport.communication.error_feedback:
        return None
    lost = [
        tensor - tf.cast(one, tensor.dtype)
        for tensor, one in zip(tensors, sent, strict=True)
    ]
    # Of a number that is not finite there is nothing to keep.
    return [
        tf.where(tf.math.is_finite(one), one, tf.zeros_like(one))
        for one in lost
    ]
