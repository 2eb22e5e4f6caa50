"""How gradients travel between replicas: one frozen value."""

from __future__ import annotations

import dataclasses

_DTYPES = (None, "bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True, slots=True)
class Communication:
    """How gradients travel between replicas.

    The default suits most jobs. Give another value where the network is slow
    (`dtype`), or where workers wait for each other long (`timeout_seconds`).

    Args:
      dtype: The type in which floating point gradients travel: `"bfloat16"`,
        `"float16"`, `"float32"`, `"float64"`, or None (default) for each
        gradient's own. They are scaled and applied in their own type again.
        16-bit types halve the bytes of float32 and round every partial sum.
      bytes_per_bucket: Gradients are packed into buckets of about this many
        bytes, an int >= 1, default 4 MiB. One gradient is never split. Several
        buckets are in flight at once, the last layers' first, so that
        communication overlaps with the backward pass.
      timeout_seconds: A replica that waits longer than this many seconds for
        the others fails with an error instead of hanging. A number > 0, default
        300.

    Raises:
      TypeError: If an argument has another type.
      ValueError: If an argument is out of range.

    Example:

    >>> slow_network = tf_xshard.Communication(dtype="bfloat16")
    >>> slow_network.bytes_per_bucket, slow_network.timeout_seconds
    (4194304, 300)

    Source: `tf.distribute.experimental.CommunicationOptions`, with the type on
    the wire that Horovod calls `Compression`.
    """

    dtype: str | None = None
    bytes_per_bucket: int = 4 << 20
    timeout_seconds: float = 300

    def __post_init__(self):
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
        for name, kinds in (
            ("bytes_per_bucket", int),
            ("timeout_seconds", (int, float)),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise TypeError(
                    f"Communication({name}=...) must be a number, got"
                    f" {value!r}."
                )
            if not 0 < value < float("inf"):
                raise ValueError(
                    f"Communication({name}={value!r}) must be positive and"
                    " finite."
                )

    def get_config(self) -> dict:
        """The arguments as a dict, for serialization.

        Returns:
          A dict that `Communication(**config)` takes back.

        Example:

        >>> tf_xshard.Communication().get_config()["bytes_per_bucket"]
        4194304
        """
        return dataclasses.asdict(self)
