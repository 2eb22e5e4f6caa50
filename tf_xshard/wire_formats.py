"""Lists the formats in which gradients are sent."""

from __future__ import annotations

import dataclasses

# The largest allowed error of a sum, relative to the sum of magnitudes.
_MAX_SUM_ERROR = 1 / 16


@dataclasses.dataclass(frozen=True)
class WireFormat:
    """Describes a format in which gradients are sent."""

    # Users pass this dtype; None is each gradient's own dtype.
    dtype: str | None
    # With "sum", collectives sum the values in this dtype. With "quantize",
    # replicas send integers with scales, and sum received values in float32.
    path: str
    # The relative error of one rounding, or 0 if a sum in this dtype is as
    # precise as a sum in the gradients' dtype.
    roundoff: float = 0.0
    # Whether the receiver gets fewer digits than the sender has. Error feedback
    # can keep the lost digits.
    loses: bool = False
    # The values of `Communication.rounding` that the format supports.
    roundings: tuple[str, ...] = ("nearest",)
    # The kinds of strategies that have the format's collectives; None for all.
    strategies: tuple[str, ...] | None = None

    @property
    def is_quantized(self) -> bool:
        """True if tensors are sent as integers with scales."""
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
            # Collectives on TPUs only sum.
            strategies=("single", "mirrored", "multi_worker"),
        ),
    )
}
