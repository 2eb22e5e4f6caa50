"""The formats in which gradients are sent: one table."""

from __future__ import annotations

import dataclasses

# An error of a sum, relative to the sum of magnitudes.
_MAX_SUM_ERROR = 1 / 16


@dataclasses.dataclass(frozen=True)
class WireFormat:
    """How the bits of gradients are sent.

    Attributes:
      dtype: What users pass; None for each gradient's own dtype.
      path: `"sum"`: collectives add the values up in this dtype.
        `"quantize"`: replicas send integers with scales, and add up in float32
        what they receive. None: there is no code for it, so it can't be used.
      roundoff: The relative error of one rounding; 0 if sums in this dtype are
        as precise as those of the gradients.
      loses: Whether the receiver sees less than the sender has, which error
        feedback can keep.
      roundings: The values of `Communication.rounding` that it has.
      strategies: The kinds of strategies that have its collectives; None for
        all.
    """

    dtype: str | None
    path: str | None = None
    roundoff: float = 0.0
    loses: bool = False
    roundings: tuple[str, ...] = ("nearest",)
    strategies: tuple[str, ...] | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether tensors shrink before they are packed and sent."""
        return self.path == "quantize"

    def dtype_of_sum(self, own: str, group_size: int) -> str:
        """See `Communication.dtype_of_sum`."""
        if self.dtype is None:
            return own
        if group_size * self.roundoff <= _MAX_SUM_ERROR:
            return self.dtype
        return own if own in TABLE and TABLE[own].roundoff else "float32"

    def dtype_of_rows(self, own: str) -> str:
        """See `Communication.dtype_of_rows`."""
        if self.dtype is None or self.is_quantized:
            return own
        return self.dtype


# A unit roundoff is half the distance from 1 to the next number.
TABLE = {
    one.dtype: one
    for one in (
        WireFormat(None, "sum"),
        WireFormat("bfloat16", "sum", roundoff=2.0**-8, loses=True),
        WireFormat("float16", "sum", roundoff=2.0**-11, loses=True),
        WireFormat("float32", "sum"),
        WireFormat("float64", "sum"),
        WireFormat(
            "int8",
            "quantize",
            loses=True,
            roundings=("nearest", "stochastic"),
            # TPUs' collectives only add up.
            strategies=("single", "mirrored", "multi_worker"),
        ),
    )
}


def usable() -> tuple[str | None, ...]:
    """The dtypes that can be used."""
    return tuple(dtype for dtype, one in TABLE.items() if one.path is not None)
