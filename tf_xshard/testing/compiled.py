"""Reports the TPU compiler's result, and finds the collectives in its HLO."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
_ARRAY = re.compile(r"\b(pred|token|bf16|[a-z]\d+[a-z0-9]*)\[([\d,<=]*)\]")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """Describes one collective of a compiled program.

    Attributes:
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
        "collective-permute", "collective-broadcast" or "ragged-all-to-all".
      replica_groups: The ids of the replicas that communicate with each other,
        or a collective-permute's (source, target) pairs. Empty means all.
      operands: The type of each operand, such as "f32[256,512]".
      num_bytes: The size of one replica's operands, in bytes.
      name: The instruction's name in the HLO text.
    """

    kind: str
    replica_groups: tuple[tuple[int, ...], ...]
    operands: tuple[str, ...]
    num_bytes: int
    name: str


def collectives(hlo_text: str) -> tuple[Collective, ...]:
    """Finds the collectives of a module, in the order of its text."""
    instructions = list(_instructions(hlo_text))
    types = {name: type_ for name, type_, _, _, _ in instructions}
    found = []
    for name, _, opcode, operands, attributes in instructions:
        kind = opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        arrays = [
            array
            for operand in operands
            for array in _ARRAY.findall(types[operand])
        ]
        found.append(
            Collective(
                kind=kind,
                replica_groups=_replica_groups(kind, attributes),
                operands=tuple(f"{dtype}[{dims}]" for dtype, dims in arrays),
                num_bytes=sum(_num_bytes(*array) for array in arrays),
                name=name,
            )
        )
    return tuple(found)


def _instructions(
    hlo_text: str,
) -> Iterator[tuple[str, str, str, list[str], str]]:
    """Yields name, type, opcode, names of operands and the rest of the line."""
    for line in hlo_text.splitlines():
        name, equals, rest = line.strip().partition(" = ")
        if not equals or line.startswith("HloModule"):
            continue
        rest = re.sub(r"/\*.*?\*/", "", rest)
        type_, rest = _split_type(rest)
        opcode, parenthesis, rest = rest.partition("(")
        if not parenthesis:
            continue
        inside, attributes = _split_parenthesis(rest)
        operands = re.findall(r"%([\w.-]+)", inside)
        yield (
            name.removeprefix("ROOT ").removeprefix("%"),
            type_,
            opcode.strip(),
            operands,
            attributes,
        )


def _split_type(text: str) -> tuple[str, str]:
    if text.startswith("("):
        inside, rest = _split_parenthesis(text[1:])
        return inside, rest.lstrip()
    type_, _, rest = text.partition(" ")
    return type_, rest


def _split_parenthesis(text: str) -> tuple[str, str]:
    """Splits text at the first closing parenthesis that it does not open."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:index], text[index + 1 :]
    return text, ""


def _num_bytes(dtype: str, dimensions: str) -> int:
    if dtype == "token":
        return 0
    sizes = [
        int(size.removeprefix("<=")) for size in dimensions.split(",") if size
    ]
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(sizes) * bits // 8


def _replica_groups(kind: str, attributes: str) -> tuple[tuple[int, ...], ...]:
    key = "replica_groups="
    if kind == "collective-permute":
        key = "source_target_pairs="
    _, found, rest = attributes.partition(key)
    if not found:
        raise ValueError(f"{kind} has no {key[:-1]}: {attributes[:200]}")
    if rest.startswith("{}"):
        return ()
    if rest.startswith("{{"):
        groups = rest[2 : rest.index("}}")].split("},{")
        return tuple(
            tuple(int(replica) for replica in group.split(","))
            for group in groups
        )
    iota = _IOTA.match(rest)
    if iota is None:
        raise ValueError(f"{kind} has unknown replica groups: {rest[:200]}")
    shape, reshape, transpose = (
        [int(n) for n in part.split(",")] if part else []
        for part in iota.groups()
    )
    ids = np.arange(math.prod(reshape)).reshape(reshape)
    if transpose:
        ids = ids.transpose(transpose)
    return tuple(map(tuple, ids.reshape(shape).tolist()))


@dataclasses.dataclass(frozen=True)
class MemoryStatistics:
    """Lists the memory that a compiled program needs on one core, in bytes.

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
        """An upper bound on the memory that is needed at any time."""
        return (
            self.argument_bytes
            + self.output_bytes
            - self.alias_bytes
            + self.temporary_bytes
            + self.code_bytes
        )


@dataclasses.dataclass(frozen=True)
class CompiledForTPU:
    """Holds the compiler's result for a step, which did not run.

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
      compile_seconds: The time that the compiler ran, in seconds.
    """

    topology: str
    device_kind: str
    num_replicas: int
    hlo_text: str = dataclasses.field(repr=False)
    stablehlo_text: str = dataclasses.field(repr=False)
    collectives: tuple[Collective, ...] = dataclasses.field(repr=False)
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
