"""Reads the collectives out of the text of an optimized HLO module."""

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
    """One collective of a compiled program.

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
