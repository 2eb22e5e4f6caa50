"""How gradients are communicated between replicas: one frozen value."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_xshard import checks

_DTYPES = (None, "bfloat16", "float16", "float32", "float64")
# Half the distance from 1 to the next number: the error of one rounding.
_UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
_MAX_SUM_ERROR = 1 / 16


@dataclasses.dataclass(frozen=True, slots=True)
class Communication:
    """How gradients are communicated between replicas.

    The default suits most jobs. Change it if the network is slow (`dtype`), or
    if workers wait long for each other (`timeout_seconds`).

    Args:
      dtype: The dtype in which floating point gradients are communicated:
        `"bfloat16"`, `"float16"`, `"float32"`, `"float64"`, or None (default)
        for each gradient's own. They are scaled and applied in their own dtype.
        16-bit dtypes halve the bytes of float32 and round every partial sum:
        the error of a sum over `group_size` replicas is up to `group_size` *
        2^-8 (bfloat16) or 2^-11 (float16) of the sum of magnitudes. If that
        could exceed 1/16, in groups of more than 16 (bfloat16) or 128 (float16)
        replicas, gradients are summed in float32, or in their own dtype if that
        has 16 bits. float16 overflows above 65504.
      bytes_per_bucket: Gradients are packed into buckets of about this many
        bytes, an int >= 1, default 16 MiB. A gradient is never split. Several
        buckets are in flight at once, the last layers' first, to overlap
        communication with the backward pass. From 8 to 64 MiB the measured
        times differ by no more than noise (benchmarks/README.md).
      timeout_seconds: A replica that waits longer than this many seconds for
        the others raises an error instead of hanging. A number > 0, default
        300.
      buckets_in_flight: How many buckets are communicated at once, an int >= 1,
        default 4. With NCCL (GPUs) always 1.

    Raises:
      TypeError: If an argument has the wrong type.
      ValueError: If an argument is out of range.

    Example:

    >>> slow_network = tf_xshard.Communication(dtype="bfloat16")
    >>> slow_network.bytes_per_bucket, slow_network.timeout_seconds
    (16777216, 300)

    Source: `tf.distribute.experimental.CommunicationOptions`, with a wire dtype
    (`Compression` in Horovod).
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
            value = checks.positive_integer(
                f"Communication({name}=...)", getattr(self, name)
            )
            object.__setattr__(self, name, value)
        checks.positive_number(
            "Communication(timeout_seconds=...)", self.timeout_seconds
        )

    def dtype_of_sum(self, dtype: str, group_size: int) -> str:
        """The dtype in which gradients of one dtype are summed over a group.

        Args:
          dtype: The gradients' own dtype.
          group_size: The number of replicas in a group.

        Returns:
          The name of a dtype: `self.dtype`, or float32 if `self.dtype` is too
          imprecise for the group. The gradients' own if `self.dtype` is None,
          or instead of float32 if it has 16 bits.

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


def checked(communication: Any) -> Communication:
    """Checks an argument `communication`.

    Args:
      communication: The value given.

    Returns:
      It, or the defaults for None.

    Raises:
      TypeError: If it is something else.
    """
    if communication is None:
        return Communication()
    if not isinstance(communication, Communication):
        raise TypeError(
            "communication must be a tf_xshard.Communication, got"
            f" {communication!r}."
        )
    return communication
