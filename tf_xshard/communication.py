"""How gradients are communicated between replicas: one frozen value."""

from __future__ import annotations

import dataclasses

from tf_xshard import checks

_DTYPES = (None, "bfloat16", "float16", "float32", "float64")
# Half the distance from 1 to the next number: what one rounding is wrong by.
_UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
_MAX_SUM_ERROR = 1 / 16


@dataclasses.dataclass(frozen=True, slots=True)
class Communication:
    """How gradients are communicated between replicas.

    The default suits most jobs. Give another value where the network is slow
    (`dtype`), or where workers wait for each other long (`timeout_seconds`).

    Args:
      dtype: The type in which floating point gradients are communicated:
        `"bfloat16"`, `"float16"`, `"float32"`, `"float64"`, or None (default)
        for each gradient's own. They are scaled and applied in their own type.
        16-bit types halve the bytes of float32 and round every partial sum:
        the error of a sum over `group_size` replicas is up to `group_size` *
        2^-8 (bfloat16) or 2^-11 (float16) of the sum of magnitudes. Where that
        could be more than 1/16, in groups of more than 16 (bfloat16) or 128
        (float16) replicas, gradients are summed in float32; those whose own
        type has 16 bits are summed in that. float16 overflows above 65504.
      bytes_per_bucket: Gradients are packed into buckets of about this many
        bytes, an int >= 1, default 16 MiB. One gradient is never split. Several
        buckets are in flight at once, the last layers' first, so that
        communication overlaps with the backward pass. From 8 to 64 MiB
        the measured times differ by no more than noise (benchmarks/README.md).
      timeout_seconds: A replica that waits longer than this many seconds for
        the others fails with an error instead of hanging. A number > 0, default
        300.
      buckets_in_flight: How many buckets are communicated at once, an int >= 1,
        default 4. NCCL (GPUs) has one after the other.

    Raises:
      TypeError: If an argument has another type.
      ValueError: If an argument is out of range.

    Example:

    >>> slow_network = tf_xshard.Communication(dtype="bfloat16")
    >>> slow_network.bytes_per_bucket, slow_network.timeout_seconds
    (16777216, 300)

    Source: `tf.distribute.experimental.CommunicationOptions`, with the type on
    the wire that Horovod calls `Compression`.
    """

    dtype: str | None = None
    bytes_per_bucket: int = 16 << 20
    timeout_seconds: float = 300
    buckets_in_flight: int = 4

    def __post_init__(self) -> None:
        if self.dtype is not None and not isinstance(self.dtype, str):
            raise TypeError(
                "Communication(dtype=...) must be a string or None, got"
                f" {self.dtype!r}. Supported: {_DTYPES}."
            )
        if self.dtype not in _DTYPES:
            raise ValueError(
                f"Communication(dtype={self.dtype!r}) is not supported."
                f" Supported: {_DTYPES}."
            )
        for name in ("bytes_per_bucket", "buckets_in_flight"):
            checks.positive_integer(
                f"Communication({name}=...)", getattr(self, name)
            )
        checks.positive_number(
            "Communication(timeout_seconds=...)", self.timeout_seconds
        )

    def dtype_of_sum(self, dtype: str, group_size: int) -> str:
        """The type in which gradients of one type are summed over a group.

        Args:
          dtype: The gradients' own type.
          group_size: How many replicas add up.

        Returns:
          The name of a type: `self.dtype`, or float32 where that would lose
          visibly; a gradient's own where there is none, or float32 would hold
          no more than it.

        Example:

        >>> slow_network = tf_xshard.Communication(dtype="bfloat16")
        >>> [slow_network.dtype_of_sum("float32", size) for size in (16, 17)]
        ['bfloat16', 'float32']
        """
        if self.dtype is None:
            return dtype
        error = group_size * _UNIT_ROUNDOFF.get(self.dtype, 0.0)
        if error <= _MAX_SUM_ERROR:
            return self.dtype
        return dtype if dtype in _UNIT_ROUNDOFF else "float32"

    def get_config(self) -> dict:
        """The arguments as a dict, for serialization.

        Returns:
          A dict that `Communication(**config)` takes back.

        Example:

        >>> tf_xshard.Communication().get_config()["bytes_per_bucket"]
        16777216
        """
        return dataclasses.asdict(self)
