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
import itertools
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

    @property
    def words_per_row(self) -> int:
        """The number of 32-bit words that are sent for a row."""
        return self.row_size // _PER_WORD + self.num_blocks


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
    blocks.words_per_row], and a float32 tensor like `rows`, or None without
    `keeps_lost`.
    """
    shape = [rows.shape[0], blocks.num_blocks, blocks.size]
    split = tf.reshape(rows, shape)
    # If a number is nan, the maximum and the minimum are nan as well.
    largest = tf.maximum(tf.reduce_max(split, 2), -tf.reduce_min(split, 2))
    scales = largest / _LARGEST
    nearest = rounding == "nearest"
    noise = None if nearest else tf.random.uniform(shape)
    is_compiled = fused and nearest
    if keeps_lost:
        round_ = compiled(_rounded) if is_compiled else _rounded
        integers, lost = round_(split, scales, noise)
    else:
        round_ = compiled(_integers) if is_compiled else _integers
        integers, lost = round_(split, scales, noise), None
    by_word = [rows.shape[0], -1, _PER_WORD]
    words = tf.bitcast(tf.reshape(integers, by_word), tf.int32)
    sent = tf.concat([words, tf.bitcast(scales, tf.int32)], 1)
    return sent, None if lost is None else tf.reshape(lost, rows.shape)


def _rounded(
    split: tf.Tensor, scales: tf.Tensor, noise: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the integers, and the rounding errors."""
    integers = _integers(split, scales, noise)
    lost = split - _scaled(integers, scales)
    # The errors of a block that is not finite are not worth keeping.
    is_finite = tf.math.is_finite(scales)[:, :, tf.newaxis]
    return integers, tf.where(is_finite, lost, tf.zeros_like(lost))


def _integers(
    split: tf.Tensor, scales: tf.Tensor, noise: tf.Tensor | None
) -> tf.Tensor:
    """Rounds to the nearest integers, or down after adding noise."""
    # A block of zeros has scale 0. Its integers are 0 with any factor.
    factors = tf.math.divide_no_nan(1.0, scales)[:, :, tf.newaxis]
    ratios = split * factors
    ratios = tf.round(ratios) if noise is None else tf.floor(ratios + noise)
    # The scale was rounded, so a ratio may exceed the largest integer.
    ratios = tf.clip_by_value(ratios, -_LARGEST, _LARGEST)
    return tf.cast(ratios, tf.int8)


def sum_rows(
    sent: tf.Tensor, blocks: Blocks, *, fused: bool = False
) -> tf.Tensor:
    """Sums received rows to a float32 tensor of shape [blocks.row_size]."""
    add = compiled(_added) if fused else _added
    return add(sent, blocks)


def dequantized(
    sent: tf.Tensor, blocks: Blocks, *, fused: bool = False
) -> tf.Tensor:
    """Converts received rows to float32, [num_rows, blocks.row_size]."""
    multiply = compiled(_multiplied) if fused else _multiplied
    return multiply(sent, blocks)


def _received(sent: tf.Tensor, blocks: Blocks) -> tuple[tf.Tensor, tf.Tensor]:
    """Splits received words into integers and scales."""
    words = blocks.row_size // _PER_WORD
    shape = [-1, blocks.num_blocks, blocks.size]
    integers = tf.reshape(tf.bitcast(sent[:, :words], tf.int8), shape)
    return integers, tf.bitcast(sent[:, words:], tf.float32)


def _scaled(integers: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
    return tf.cast(integers, tf.float32) * scales[:, :, tf.newaxis]


def _multiplied(sent: tf.Tensor, blocks: Blocks) -> tf.Tensor:
    numbers = _scaled(*_received(sent, blocks))
    return tf.reshape(numbers, [-1, blocks.row_size])


def _added(sent: tf.Tensor, blocks: Blocks) -> tf.Tensor:
    return tf.reduce_sum(_multiplied(sent, blocks), 0)


@functools.cache
def compiled(function: Callable) -> Callable:
    """Makes XLA compile a function, once for each combination of shapes."""
    return tf.function(function, jit_compile=True, autograph=False)


Lost = list[tf.Tensor] | None


def padding(num_elements: int, group_size: int) -> int:
    """Returns the number of zeros that `summed` needs at a tensor's end."""
    row_size = blocks_for(-(-num_elements // group_size)).row_size
    return group_size * row_size - num_elements


def scattered(
    buckets: Sequence[Sequence[tf.Tensor]], transport: transport_lib.Transport
) -> tuple[list[tf.Tensor], Lost]:
    """Returns the rows of group sums at this replica's position in its group.

    The tensors of a bucket, of shapes [group_size, size], are sent together.
    Returns float32 sums of shapes [size], and the rounding errors of each
    tensor, or None without error feedback. Raises ValueError if `transport` has
    no all-to-all.
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
    with recorder.labelled(dtype=transport.communication.dtype):
        stacks = transport.all_gather(
            [one[0] for one in _together(sent, counts)]
        )
    totals = [
        tf.reshape(
            dequantized(
                stack,
                blocks_for(own.shape[0]),
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
    add = compiled(_added_row) if _is_fused(transport) else _added_row
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
    with recorder.labelled(dtype=transport.communication.dtype):
        received = transport.all_to_all(_together(sent, counts))
    sums = [
        sum_rows(
            one,
            blocks_for(own.shape[1]),
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
        quantized(
            tf.cast(one, tf.float32),
            blocks_for(one.shape[1]),
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
    return (
        "CPU" in transport.site.device
        and not tf.executing_eagerly()
        and not tracing.has_debugger()
    )
