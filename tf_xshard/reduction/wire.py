"""Sums packed tensors over a group, in the dtype in which they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_xshard import wire_formats
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.reduction import quantization


class Received(NamedTuple):
    """Holds group sums, and the errors of this replica's tensors.

    `lost` is None without `Communication.error_feedback`.
    """

    sums: list[tf.Tensor]
    lost: list[tf.Tensor] | None


def padding(num_elements: int, transport: transport_lib.Transport) -> int:
    """Returns the number of zeros that `summed` needs at a tensor's end."""
    if not wire_formats.TABLE[transport.communication.dtype].is_quantized:
        return 0
    return quantization.padding(num_elements, transport.groups.group_size)


def summed(
    buckets: Sequence[Sequence[tf.Tensor]], transport: transport_lib.Transport
) -> Received:
    """Sums tensors, which end with `padding` zeros, over the group.

    A bucket has one tensor unless the format is quantized.
    """
    if wire_formats.TABLE[transport.communication.dtype].is_quantized:
        return Received(*quantization.summed(buckets, transport))
    tensors = [tensor for [tensor] in buckets]
    sent = [_cast(tensor, transport) for tensor in tensors]
    return Received(
        transport.sum(sent), _lost_by_cast(tensors, sent, transport)
    )


def scattered(
    buckets: Sequence[Sequence[tf.Tensor]], transport: transport_lib.Transport
) -> Received:
    """Returns the rows of group sums at this replica's position in its group.

    Tensors have the shapes [group_size, size], and their sums [size]. A bucket
    has one tensor unless the format is quantized. Raises ValueError if the
    transport can't sum a dtype.
    """
    if wire_formats.TABLE[transport.communication.dtype].is_quantized:
        return Received(*quantization.scattered(buckets, transport))
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
    # The error of an element that is not finite is not worth keeping.
    return [
        tf.where(tf.math.is_finite(one), one, tf.zeros_like(one))
        for one in lost
    ]
