"""Rounds blocks of float32 numbers to 8-bit integers, with a scale per block.

numbers of a block     x = [0.3, -1.2, 0.7, ...]
scale                  max|x| / 127, a float32
on the wire            round(x / scale) in [-127, 127]: 1 byte, + 4 a block
received               integer * scale: within half a scale of x

A block with a number that is not finite is received as nan. Collectives have no
8-bit types, so four integers are sent as one 32-bit integer. The collectives
only move these integers; replicas add up what they receive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

# With this size, scales are 1.6% of the bytes. benchmarks/README.md has the
# measurements.
NUMBERS_PER_BLOCK = 256
_LARGEST = 127
# An int32 holds four 8-bit integers.
_PER_WORD = 4


class Blocks(NamedTuple):
    """A division of rows of numbers into blocks.

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
    """Quantizes rows, and returns what is sent and what the rounding loses.

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
    """Returns the integers, and what the rounding loses."""
    integers = _integers(split, scales, noise)
    lost = split - _scaled(integers, scales)
    # A block that is not finite loses nothing that is worth keeping.
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


def summed(
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
