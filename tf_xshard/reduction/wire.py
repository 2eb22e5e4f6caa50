"""Sums packed tensors over a group, in the dtype in which they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_xshard import wire_formats
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.reduction import quantization


class Reduced(NamedTuple):
    """Holds reduced tensors, and the errors of this replica's tensors.

    `lost` is None without `Communication.error_feedback`.
    """

    values: list[tf.Tensor]
    lost: list[tf.Tensor] | None


def is_quantized(transport: transport_lib.Transport) -> bool:
    """Returns True if tensors are sent as integers with scales."""
    return wire_formats.TABLE[transport.communication.dtype].is_quantized


def padding(num_elements: int, transport: transport_lib.Transport) -> int:
    """Returns the number of zeros that `summed` needs at a tensor's end."""
    if not is_quantized(transport):
        return 0
    return quantization.padding(num_elements, transport.groups.group_size)


def summed(
    tensors: Sequence[tf.Tensor], transport: transport_lib.Transport
) -> Reduced:
    """Sums tensors, which end with `padding` zeros, over the group."""
    if is_quantized(transport):
        return Reduced(*quantization.summed(tensors, transport))
    sent = [_cast(tensor, transport) for tensor in tensors]
    return Reduced(transport.sum(sent), _lost_by_cast(tensors, sent, transport))


def scattered(
    rows: Sequence[tf.Tensor], transport: transport_lib.Transport
) -> Reduced:
    """Returns the rows of group sums at this replica's position in its group.

    Tensors have the shapes [group_size, size], and their sums [size]. Raises
    ValueError if the transport can't sum a dtype.
    """
    if is_quantized(transport):
        return Reduced(*quantization.scattered(rows, transport))
    sent = [_cast(tensor, transport) for tensor in rows]
    return Reduced(
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
