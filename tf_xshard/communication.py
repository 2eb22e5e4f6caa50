"""Defines `Communication`, the settings for communicating gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_xshard import checks
from tf_xshard import wire_formats

_TRANSPORTS = ("auto", "mpi", "tensorflow")


@dataclasses.dataclass(frozen=True, slots=True)
class Communication:
    """Configures how replicas communicate gradients.

    The default suits most jobs. Change it if the network is slow (`dtype`), or
    if workers wait long for each other (`timeout_seconds`).

    Args:
      dtype: The dtype in which floating point gradients are communicated,
        `"bfloat16"`, `"float16"`, `"float32"`, `"float64"`, `"int8"`, or None
        (default) for each gradient's own dtype. Gradients are scaled and
        applied in their own dtype. A 16-bit dtype halves the bytes of float32
        and rounds every partial sum. Relative to the sum of magnitudes, the
        error is at most `group_size` * 2^-8 (bfloat16) or `group_size` * 2^-11
        (float16). In groups of more than 16 (bfloat16) or 128 (float16)
        replicas, this bound exceeds 1/16. Gradients are then sent and summed in
        float32, or in their own dtype if it has 16 bits. float16 overflows
        above 65504.
        `"int8"` sends a quarter of float32's bytes, as 8-bit integers with one
        float32 scale for each 256 values. The integers are summed in float32
        and rounded again. float64 gradients must therefore not exceed the range
        of float32. Rows of IndexedSlices keep their own dtype. `"int8"` works
        only under MirroredStrategy, and under MultiWorkerMirroredStrategy in a
        `tf.function`.
      bytes_per_bucket: The approximate size of a bucket of packed gradients in
        bytes, an int >= 1. Default: 16 MiB. A gradient is never split. Several
        buckets are in flight at once, starting with the last layers, to overlap
        communication with the backward pass. Between 8 and 64 MiB, measured
        times differ by no more than noise (benchmarks/README.md).
      timeout_seconds: The seconds that a replica waits for other replicas
        before it raises an error, a number > 0. Default: 300.
      buckets_in_flight: The number of buckets that are communicated at once, an
        int >= 1. Default: 4. With NCCL (GPUs) and with MPI, it is always 1.
      error_feedback: Whether to add the rounding error of a replica's gradient
        to the replica's next gradient, which keeps training close to float32.
        Each replica gets one additional variable per trained variable, of the
        same shape. These variables are saved and restored like others. Only for
        `"int8"`, `"bfloat16"` and `"float16"`. Default: False.
      rounding: `"nearest"` (default), or `"stochastic"` (`"int8"` only), which
        rounds up or down at random, so that the mean over steps is exact.
      transport: The library for communication between processes that have
        one CPU replica each. `"auto"` (default) uses MPI if
        `tf_xshard.connect` found that MPI started the processes, and if mpi4py
        is installed. Otherwise, it uses TensorFlow's own collectives. `"mpi"`
        uses MPI, or raises an error that says why it can't. `"tensorflow"`
        never uses MPI.

    Raises:
      TypeError: If an argument has the wrong type.
      ValueError: If an argument is out of range.

    Example:

    >>> slow_network = tf_xshard.Communication(dtype="bfloat16")
    >>> slow_network.bytes_per_bucket, slow_network.timeout_seconds
    (16777216, 300)

    Source: `tf.distribute.experimental.CommunicationOptions`, with a wire dtype
    (`Compression` in Horovod). Error feedback is from Seide et al. 2014 and
    Karimireddy et al. 2019, arXiv 1901.09847.
    """

    dtype: str | None = None
    bytes_per_bucket: int = 16 << 20
    timeout_seconds: float = 300
    buckets_in_flight: int = 4
    error_feedback: bool = False
    rounding: str = "nearest"
    transport: str = "auto"

    def __post_init__(self) -> None:
        usable = tuple(wire_formats.TABLE)
        if self.dtype is not None and not isinstance(self.dtype, str):
            raise TypeError(
                "Communication(dtype=...) must be a string or None, got"
                f" {self.dtype!r}. Supported: {usable}."
            )
        if self.dtype not in usable:
            raise ValueError(
                f"Communication(dtype={self.dtype!r}) is not supported."
                f" Supported: {usable}."
            )
        for name in ("bytes_per_bucket", "buckets_in_flight"):
            value = checks.positive_integer(
                f"Communication({name}=...)", getattr(self, name)
            )
            object.__setattr__(self, name, value)
        checks.positive_number(
            "Communication(timeout_seconds=...)", self.timeout_seconds
        )
        checks.boolean("Communication(error_feedback=...)", self.error_feedback)
        if self.transport not in _TRANSPORTS:
            raise ValueError(
                f"Communication(transport={self.transport!r}) is not supported."
                f" Supported: {_TRANSPORTS}."
            )
        formats = wire_formats.TABLE.values()
        if self.error_feedback and not wire_formats.TABLE[self.dtype].loses:
            raise ValueError(
                "Communication(error_feedback=True) keeps what a smaller dtype"
                f" loses, got dtype={self.dtype!r}, which loses nothing. Pass"
                " one of the dtypes"
                f" {tuple(one.dtype for one in formats if one.loses)}."
            )
        if self.rounding not in wire_formats.TABLE[self.dtype].roundings:
            roundings = [r for one in formats for r in one.roundings]
            needs = [
                f'"{rounding}" needs dtype="{one.dtype}"'
                for one in formats
                for rounding in one.roundings
                if rounding not in wire_formats.TABLE[None].roundings
            ]
            raise ValueError(
                f"Communication(rounding={self.rounding!r}) is not supported"
                f" with dtype={self.dtype!r}. Supported:"
                f" {tuple(dict.fromkeys(roundings))}; {', '.join(needs)}."
            )

    def dtype_of_sum(self, dtype: str, group_size: int) -> str:
        """Returns the dtype in which gradients are summed over a group.

        Args:
          dtype: The gradients' own dtype.
          group_size: The number of replicas in a group.

        Returns:
          The name of a dtype. It is `self.dtype`, or `dtype` if `self.dtype` is
          None. If `self.dtype` is too imprecise for the group, it is `dtype`
          if `dtype` has 16 bits, else float32.

        Example:

        >>> slow_network = tf_xshard.Communication(dtype="bfloat16")
        >>> [slow_network.dtype_of_sum("float32", size) for size in (16, 17)]
        ['bfloat16', 'float32']
        """
        return wire_formats.TABLE[self.dtype].dtype_of_sum(dtype, group_size)

    def exact(self) -> Communication:
        """Returns a copy of these settings for values that must stay exact.

        Returns:
          A `Communication` in each tensor's own dtype.

        Example:

        >>> tf_xshard.Communication(dtype="int8").exact().dtype is None
        True
        """
        return dataclasses.replace(
            self, dtype=None, error_feedback=False, rounding="nearest"
        )

    def dtype_of_rows(self, dtype: str) -> str:
        """Returns the dtype in which rows of IndexedSlices are sent.

        The receiver sums rows in their own dtype.

        Args:
          dtype: The rows' own dtype.

        Returns:
          The name of a dtype.

        Example:

        >>> tf_xshard.Communication(dtype="int8").dtype_of_rows("float32")
        'float32'
        """
        return wire_formats.TABLE[self.dtype].dtype_of_rows(dtype)

    def get_config(self) -> dict:
        """Returns the arguments, for serialization.

        Returns:
          A dict for `Communication(**config)`.

        Example:

        >>> tf_xshard.Communication().get_config()["bytes_per_bucket"]
        16777216
        """
        return dataclasses.asdict(self)


def checked(communication: Any) -> Communication:
    """Checks a `communication` argument; None becomes the default."""
    if communication is None:
        return Communication()
    if not isinstance(communication, Communication):
        raise TypeError(
            "communication must be a tf_xshard.Communication, got"
            f" {communication!r}."
        )
    return communication
