"""Rewrites the bridge's StableHLO to a module that every compiler accepts."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np

from tf_xshard.private.jax import tpu_simulation
from tf_xshard.testing import tpu_operations

_UNKNOWN = "tf_xshard.unknown"
# Matches long bool constants. The bridge prints one bit per element in
# TensorFlow 2.20 and 2.21, and since 2.22 one byte, as the parser expects.
_BOOLS = re.compile(r'dense<"0x([0-9A-F]+)"> : tensor<([0-9x]+)xi1>')


def portable(text: str) -> str:
    """Rewrites a module of the bridge so that every compiler accepts it."""
    with tpu_simulation.make_ir_context():
        return str(parse(text))


def parse(text: str) -> tpu_simulation.ir.Module:
    """Parses a module of the bridge, in the current MLIR context."""
    # The bridge has no name for HLO's dynamic-reshape, and the parser rejects
    # names that it does not know.
    text = text.replace(
        '"mhlo.unknown"(', f"stablehlo.custom_call @{_UNKNOWN}("
    )
    text = _BOOLS.sub(_as_bytes, text)
    module = tpu_simulation.ir.Module.parse(text)
    _replace_custom_calls(module)
    return module


def _as_bytes(match: re.Match[str]) -> str:
    num_elements = math.prod(int(size) for size in match[2].split("x"))
    data = bytes.fromhex(match[1])
    if len(data) != num_elements:
        bits = np.unpackbits(
            np.frombuffer(data, np.uint8), count=num_elements, bitorder="little"
        )
        data = bits.tobytes()
    return f'dense<"0x{data.hex().upper()}"> : tensor<{match[2]}xi1>'


def constants(text: str) -> list[np.ndarray]:
    """Returns the constants of a module."""
    ir = tpu_simulation.ir
    found = []

    def visit(operation):
        if operation.name == "stablehlo.constant":
            value = ir.DenseElementsAttr(operation.attributes["value"])
            found.append(np.array(value))
        return ir.WalkResult.ADVANCE

    with tpu_simulation.make_ir_context():
        parse(text).operation.walk(visit)
    return found


def _replace_custom_calls(module: tpu_simulation.ir.Module) -> None:
    """Replaces custom calls by StableHLO's operations, and removes copies."""
    # TensorFlow's bridge prints operations of other dialects, and custom calls
    # that stand for a TPU's collectives.
    ir = tpu_simulation.ir
    found = []

    def visit(operation):
        if operation.name == "mhlo.copy":
            found.append(operation)
        elif operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(
                operation.attributes["call_target_name"]
            ).value
            if target.startswith("tf_xshard."):
                found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for operation in found:
        replacement = operation.operands[0]
        if operation.name == "stablehlo.custom_call":
            replacement = _replacement(operation)
        operation.results[0].replace_all_uses_with(replacement)
        operation.erase()


def _replacement(operation: Any) -> Any:
    """Returns the value that replaces the result of a custom call."""
    ir = tpu_simulation.ir
    target = ir.StringAttr(operation.attributes["call_target_name"]).value
    if target == _UNKNOWN:
        return _dynamic_reshape(operation)
    config = json.loads(
        ir.StringAttr(operation.attributes["backend_config"]).value
    )
    replicas = ir.DenseIntElementsAttr.get(
        np.array(config["replicas"], np.int64)
    )
    with ir.InsertionPoint(operation), operation.location:
        if target == tpu_operations.COLLECTIVE_PERMUTE:
            return tpu_simulation.stablehlo.CollectivePermuteOp(
                operation.operands[0], replicas
            ).result
        return tpu_simulation.stablehlo.AllToAllOp(
            [operation.operands[0]],
            split_dimension=config["split_dimension"],
            concat_dimension=config["concat_dimension"],
            split_count=config["split_count"],
            replica_groups=replicas,
        ).results[0]


def _dynamic_reshape(operation: Any) -> Any:
    ir = tpu_simulation.ir
    operand, *sizes = operation.operands
    (result,) = operation.results
    if len(sizes) != result.type.rank or any(s.type.rank for s in sizes):
        raise NotImplementedError(
            "The bridge emits an operation that StableHLO has no name for:"
            f" {operation}"
        )
    hlo = tpu_simulation.stablehlo
    with ir.InsertionPoint(operation), operation.location:
        one = ir.RankedTensorType.get([1], sizes[0].type.element_type)
        shape = hlo.ConcatenateOp(
            [hlo.ReshapeOp(one, size) for size in sizes], dimension=0
        )
        return hlo.DynamicReshapeOp(result.type, operand, shape).result
