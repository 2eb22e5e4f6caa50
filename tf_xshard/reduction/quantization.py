"""Rounds blocks of float32 numbers to 8-bit integers, with a scale per block.

numbers of a block     x = [0.3, -1.2, 0.7, ...]
scale                  max|x| / 127, a float32
on the wire            round(x / scale) in [-127, 127]: 1 byte, + 4 a block
received               integer * scale: within half a scale of x

A block with a number that is not finite is received as nan. Collectives have no
8-bit types, so four integers are sent as one 32-bit integer. The collectives
only move these integers, and replicas add up the numbers that they receive.

To sum, each replica of a group sends a row to each other replica:

this replica's rows           one row for each replica of the group
  quantize, all-to-all        each replica's row at this replica's position
  sum in float32              the sum's row at this position
  quantize, all-gather        all rows of the sum, the same bits on all replicas
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.private.tensorflow import tracing

# With this size, scales are 1.6% of the bytes. benchmarks/README.md has the
# measurements.
NUMBERS_PER_BLOCK = 256
_LARGEST = 127
# An int32 holds four 8-bit integers.
_PER_WORD = 4


class Blocks(NamedTuple):
    """Divides rows of numbers into blocks.

    A row has `num_blocks` blocks of `size` numbers each, a multiple of four.
    """

    size: int
    num_blocks: int

    @property
    def row_size(self) -> int:
        """The length of a row."""
        return self.size * self.num_blocks


def blocks_for(num_numbers: int) -> Blocks:
    """Returns the blocks of a row of at least this many numbers."""
    words = max(1, -(-num_numbers // _PER_WORD))
    size = min(NUMBERS_PER_BLOCK, words * _PER_WORD)
    return Blocks(size, -(-words * _PER_WORD // size))


def quantized(
    rows: tf.Tensor,
    blocks: Blocks,
    rounding: str,
    *,
    keeps_lost: bool = True,
    fused: bool = False,
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Quantizes rows, and returns the words to send and the rounding errors.

    `rows` are float32 of shape [num_rows, blocks.row_size]. `rounding` is
    `"nearest"`, or `"stochastic"`, which rounds up with the probability that
    makes the mean exact. With `fused`, XLA compiles the nearest rounding, which
    is twice as fast on CPUs. Returns an int32 tensor of shape [num_rows,
    words], and a float32 tensor like `rows`, or None without `keeps_lost`.
    """
    shape = [rows.shape[0], blocks.num_blocks, blocks.size]
    split = tf.reshape(rows, shape)
    # If a number is nan, the maximum and the minimum are nan as well.
    largest = tf.maximum(tf.reduce_max(split, 2), -tf.reduce_min(split, 2))
    scales = largest / _LARGEST
    noise = None if rounding == "nearest" else tf.random.uniform(shape)
    integers, lost = _compiled(_rounded, fused and noise is None)(
        split, scales, noise, keeps_lost
    )
    by_word = [rows.shape[0], -1, _PER_WORD]
    words = tf.bitcast(tf.reshape(integers, by_word), tf.int32)
    sent = tf.concat([words, tf.bitcast(scales, tf.int32)], 1)
    return sent, None if lost is None else tf.reshape(lost, rows.shape)


def _rounded(
    split: tf.Tensor,
    scales: tf.Tensor,
    noise: tf.Tensor | None,
    keeps_lost: bool,
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Rounds to the nearest integers, or down after adding noise.

    Returns the integers, and the rounding errors or None.
    """
    # A block of zeros has scale 0. Its integers are 0 with any factor.
    factors = tf.math.divide_no_nan(1.0, scales)[:, :, tf.newaxis]
    ratios = split * factors
    ratios = tf.round(ratios) if noise is None else tf.floor(ratios + noise)
    # The scale was rounded, so a ratio may exceed the largest integer.
    ratios = tf.clip_by_value(ratios, -_LARGEST, _LARGEST)
    integers = tf.cast(ratios, tf.int8)
    if not keeps_lost:
        return integers, None
    lost = split - _scaled(integers, scales)
    # The errors of a block that is not finite are not worth keeping.
    is_finite = tf.math.is_finite(scales)[:, :, tf.newaxis]
    return integers, tf.where(is_finite, lost, tf.zeros_like(lost))


def _scaled(integers: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
    return tf.cast(integers, tf.float32) * scales[:, :, tf.newaxis]


def _dequantized(sent: tf.Tensor, blocks: Blocks) -> tf.Tensor:
    """Converts received rows to float32, [num_rows, blocks.row_size]."""
    words = blocks.row_size // _PER_WORD
    shape = [-1, blocks.num_blocks, blocks.size]
    integers = tf.reshape(tf.bitcast(sent[:, :words], tf.int8), shape)
    scales = tf.bitcast(sent[:, words:], tf.float32)
    return tf.reshape(_scaled(integers, scales), [-1, blocks.row_size])


def _sum_of_rows(sent: tf.Tensor, blocks: Blocks) -> tf.Tensor:
    """Sums received rows to a float32 tensor of shape [blocks.row_size]."""
    return tf.reduce_sum(_dequantized(sent, blocks), 0)


@functools.cache
def _compiled(function: Callable, fused: bool) -> Callable:
    """Makes XLA compile a function, once for each combination of shapes."""
    if not fused:
        return function
    return tf.function(function, jit_compile=True, autograph=False)


Lost = list[tf.Tensor] | None


def padding(num_elements: int, group_size: int) -> int:
    """Returns the number of zeros that `summed` needs at a tensor's end."""
    row_size = blocks_for(-(-num_elements // group_size)).row_size
    return group_size * row_size - num_elements


def scattered(
    tensors: Sequence[tf.Tensor], transport: transport_lib.Transport
) -> tuple[list[tf.Tensor], Lost]:
    """Returns the rows of group sums at this replica's position in its group.

    Tensors have the shapes [group_size, size]. Returns float32 sums of shapes
    [size], and the rounding errors of each tensor, or None without error
    feedback. Raises ValueError if `transport` has no all-to-all.
    """
    sums, lost = _scattered([_whole_blocks(one) for one in tensors], transport)
    sizes = [one.shape[1] for one in tensors]
    if lost is not None:
        lost = [one[:, :size] for one, size in zip(lost, sizes, strict=True)]
    return [one[:size] for one, size in zip(sums, sizes, strict=True)], lost


def _whole_blocks(rows: tf.Tensor) -> tf.Tensor:
    num_zeros = padding(rows.shape[1], 1)
    return tf.pad(rows, [[0, 0], [0, num_zeros]]) if num_zeros else rows


def summed(
    tensors: Sequence[tf.Tensor], transport: transport_lib.Transport
) -> tuple[list[tf.Tensor], Lost]:
    """Sums tensors over the group; see `padding` for their size."""
    group_size = transport.groups.group_size
    sums, lost = _scattered(
        [tf.reshape(one, [group_size, -1]) for one in tensors], transport
    )
    sent, lost_of_sums = _quantized(
        [one[tf.newaxis] for one in sums], transport
    )
    with recorder.labelled(dtype=transport.communication.dtype):
        stacks = transport.all_gather([one[0] for one in sent])
    dequantized = _compiled(_dequantized, _is_fused(transport))
    totals = [
        tf.reshape(dequantized(stack, blocks_for(own.shape[0])), [-1])
        for stack, own in zip(stacks, sums, strict=True)
    ]
    if lost is None or lost_of_sums is None:
        return totals, None
    # Only the replica that quantized a row of the sum carries that row's loss.
    # Otherwise the next sum would contain the loss several times.
    own = tf.one_hot(transport.position(), group_size)[:, tf.newaxis]
    add = _compiled(_added_row, _is_fused(transport))
    return totals, [
        tf.reshape(add(one, of_sum, own), [-1])
        for one, of_sum in zip(lost, lost_of_sums, strict=True)
    ]


def _scattered(
    tensors: Sequence[tf.Tensor], transport: transport_lib.Transport
) -> tuple[list[tf.Tensor], Lost]:
    """Does what `scattered` does, for rows that consist of whole blocks."""
    sent, lost = _quantized(tensors, transport)
    with recorder.labelled(dtype=transport.communication.dtype):
        received = transport.all_to_all(sent)
    sum_of_rows = _compiled(_sum_of_rows, _is_fused(transport))
    return [
        sum_of_rows(one, blocks_for(own.shape[1]))
        for one, own in zip(received, tensors, strict=True)
    ], lost


def _quantized(
    tensors: Sequence[tf.Tensor], transport: transport_lib.Transport
) -> tuple[list[tf.Tensor], Lost]:
    how = transport.communication
    results = [
        quantized(
            tf.cast(one, tf.float32),
            blocks_for(one.shape[1]),
            how.rounding,
            keeps_lost=how.error_feedback,
            fused=_is_fused(transport),
        )
        for one in tensors
    ]
    sent = [one for one, _ in results]
    return sent, [one for _, one in results] if how.error_feedback else None


def _added_row(
    rows: tf.Tensor, row: tf.Tensor, is_there: tf.Tensor
) -> tf.Tensor:
    return rows + is_there * row


def _is_fused(transport: transport_lib.Transport) -> bool:
    """Returns True if XLA compiles the arithmetic."""
    # The compiled arithmetic was measured on CPUs only.
    return (
        "CPU" in transport.site.device
        and not tf.executing_eagerly()
        and not tracing.has_debugger()
    )
