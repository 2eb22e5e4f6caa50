"""The result of the TPU compiler, and its report."""

from __future__ import annotations

import dataclasses

from tf_xshard.testing import compiled_hlo


@dataclasses.dataclass(frozen=True)
class MemoryStatistics:
    """The memory that a compiled program needs on one core, in bytes.

    Attributes:
      argument_bytes: Arguments and variables.
      output_bytes: Outputs and the new values of variables.
      alias_bytes: The part of the outputs that reuses the arguments' memory.
      temporary_bytes: Buffers that exist only during the step.
      code_bytes: The program itself.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    code_bytes: int

    @property
    def peak_bytes(self) -> int:
        """An upper bound of the memory that is needed at any time."""
        return (
            self.argument_bytes
            + self.output_bytes
            - self.alias_bytes
            + self.temporary_bytes
            + self.code_bytes
        )


@dataclasses.dataclass(frozen=True)
class CompiledForTPU:
    """A step that the TPU compiler compiled. It did not run.

    Attributes:
      topology: The topology's name, such as "v5e:2x4".
      device_kind: The compiler's name for the TPU.
      num_replicas: The number of replicas.
      hlo_text: The optimized HLO module.
      stablehlo_text: The StableHLO module that was compiled.
      collectives: The collectives in `hlo_text`, each a `Collective` with
        `kind`, `replica_groups`, `operands`, `num_bytes` and `name`.
      memory: The memory that one core needs, a `MemoryStatistics`.
      flops: The compiler's estimate of one replica's floating-point operations,
        or None without an estimate.
      compile_seconds: How long the compiler ran.
    """

    topology: str
    device_kind: str
    num_replicas: int
    hlo_text: str = dataclasses.field(repr=False)
    stablehlo_text: str = dataclasses.field(repr=False)
    collectives: tuple[compiled_hlo.Collective, ...] = dataclasses.field(
        repr=False
    )
    memory: MemoryStatistics
    flops: float | None
    compile_seconds: float

    def __str__(self) -> str:
        memory = self.memory
        lines = [
            f"Compiled for TPU (did not run): {self.topology},"
            f" {self.device_kind}, {self.num_replicas} replicas,"
            f" {self.compile_seconds:.1f} s",
            f"  memory of one core: at most {_megabytes(memory.peak_bytes)}"
            f" (arguments {_megabytes(memory.argument_bytes)},"
            f" temporary {_megabytes(memory.temporary_bytes)},"
            f" code {_megabytes(memory.code_bytes)})",
            f"  flops of one replica: {_or_unknown(self.flops)}",
            f"  collectives: {len(self.collectives)}",
        ]
        for collective in self.collectives:
            arrays = len(collective.operands)
            lines.append(
                f"    {collective.kind} of {arrays}"
                f" array{'' if arrays == 1 else 's'},"
                f" {_megabytes(collective.num_bytes)},"
                f" groups {_shortened(collective.replica_groups)}"
            )
        return "\n".join(lines)


def _or_unknown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3g} MB"


def _shortened(groups: tuple[tuple[int, ...], ...]) -> str:
    text = str([list(group) for group in groups])
    return text if len(text) <= 60 else f"{text[:45]}... ({len(groups)} groups)"
