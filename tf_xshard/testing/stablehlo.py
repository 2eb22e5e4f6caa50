"""Lowers a replicated program to StableHLO that every compiler accepts."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_xshard import dependencies
from tf_xshard.private.jax import tpu_simulation
from tf_xshard.testing import replicated_program
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
        if target == tpu_operations.CUSTOM_CALLS["CollectivePermute"]:
            return tpu_simulation.stablehlo.CollectivePermuteOp(
                operation.operands[0], replicas
            ).result
        assert target == tpu_operations.CUSTOM_CALLS["AllToAll"], target
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


_ELEMENT_TYPES = {
    "bool": "i1",
    "bfloat16": "bf16",
    "complex64": "complex<f32>",
    "complex128": "complex<f64>",
    **{f"float{n}": f"f{n}" for n in (16, 32, 64)},
    **{f"int{n}": f"i{n}" for n in (4, 8, 16, 32, 64)},
    **{f"uint{n}": f"ui{n}" for n in (4, 8, 16, 32, 64)},
}


@dataclasses.dataclass(frozen=True)
class Result:
    """Holds the indices of the results that form an output of the program."""

    # The output's values, which are padded if the output's shape is dynamic.
    data: int
    # The output's true shape if the shape is dynamic, else None.
    sizes: int | None


@dataclasses.dataclass(frozen=True)
class Lowered:
    """Holds a program in StableHLO."""

    # The module, whose parameters are first arguments and then variables.
    text: str
    # One `Result` for each output of the program.
    outputs: tuple[Result, ...]
    # Maps each written variable's index to its new value's index among the
    # results.
    updates: dict[int, int]
    num_results: int


def lower(
    program: replicated_program.ReplicatedProgram,
    shapes: tuple[tuple[int, ...], ...],
) -> Lowered:
    """Lowers a program with TensorFlow's bridge, as for a TPU."""
    check_constants()
    specs = [
        tf.TensorSpec(shape, spec.dtype)
        for shape, spec in zip(shapes, program.argument_specs, strict=True)
    ]
    results: list[Result] = []
    with tf.init_scope(), tf.device("CPU:0"):
        # The bridge reads a variable's shape from the variable itself.
        stand_ins = [
            tpu_simulation.ResourceVariable(
                tf.zeros(v.spec.shape, v.spec.dtype)
            )
            for v in program.variables
        ]

        def body(*arguments):
            tensors = dict(zip(program.argument_names, arguments, strict=True))
            graph = tf.compat.v1.get_default_graph()
            for variable, stand_in in zip(
                program.variables, stand_ins, strict=True
            ):
                tensors[variable.name] = graph.capture(stand_in.handle)
            return _import(program, tensors, results)

        function = tf.function(
            body, jit_compile=True, autograph=False, input_signature=specs
        )
        try:
            text = function.experimental_get_compiler_ir(*specs)(
                stage="stablehlo"
            )
        except (tf.errors.OpError, ValueError) as error:
            raise NotImplementedError(
                "XLA can't compile the function given to strategy.run(). A TPU"
                " can't compile it either, or runs the operation on its host"
                " (automatic outside compilation), which is not simulated."
                f" XLA's error: {error}"
            ) from error
    return _finish(text, program, specs, tuple(results))


@functools.cache
def check_constants() -> None:
    """Checks, once in a process, that constants arrive unchanged."""
    # The bridge prints long constants as bytes, whose meaning TensorFlow 2.22
    # has changed for bools. A wrong attention mask would be silent. These
    # constants are longer than constants that the bridge prints as a list.
    numbers = np.arange(203) * 7 % 11
    known = (numbers < 4, numbers.astype("float32"), numbers)
    function = tf.function(
        lambda: [tf.constant(value) for value in known],
        jit_compile=True,
        autograph=False,
        input_signature=(),
    )
    with tf.init_scope(), tf.device("CPU:0"):
        text = function.experimental_get_compiler_ir()(stage="stablehlo")
    for found, value in zip(constants(text), known, strict=True):
        if not np.array_equal(found, value):
            raise ImportError(
                f"TensorFlow {tf.__version__} writes {value.dtype} constants in"
                " a way that tf_xshard.testing does not know, so programs would"
                " compute wrong numbers. Tested: TensorFlow"
                f" {dependencies.tested_range('tensorflow')}."
            )


def _import(
    program: replicated_program.ReplicatedProgram,
    tensors: dict[str, tf.Tensor],
    results: list[Result],
) -> list[tf.Tensor]:
    """Imports the program into the current graph, and returns its outputs."""
    wanted = [name for name in program.output_names if name not in tensors]
    imported = tf.graph_util.import_graph_def(
        program.graph_def,
        input_map=tensors,
        return_elements=wanted,
        name="",
    )
    tensors = {**tensors, **dict(zip(wanted, imported, strict=True))}
    outputs: list[tf.Tensor] = []
    for name in program.output_names:
        output = tf.identity(tensors[name])
        if output.shape.rank is None:
            raise NotImplementedError(
                f"strategy.run() returns a tensor of unknown rank ({name})."
                " Set its shape."
            )
        if output.shape.is_fully_defined():
            results.append(Result(len(outputs), None))
            outputs.append(output)
            continue
        padded = output
        for dimension, size in enumerate(output.shape):
            if size is None:
                padded = tpu_simulation.remove_dynamic_dimension(
                    padded, dimension
                )
        results.append(Result(len(outputs), len(outputs) + 1))
        outputs += [padded, tf.shape(output)]
    return outputs


def _finish(
    text: str,
    program: replicated_program.ReplicatedProgram,
    specs: Sequence[tf.TensorSpec],
    results: tuple[Result, ...],
) -> Lowered:
    with tpu_simulation.make_ir_context():
        module = parse(text)
        num_outputs = sum(1 if r.sizes is None else 2 for r in results)
        main = _main(module)
        _check_parameters(main, program, specs)
        updates = {}
        for parameter, output in _aliases(module):
            variable = parameter - len(specs)
            assert program.variables[variable].is_written, variable
            updates[variable] = output
        num_results = len(main.type.results)
        assert num_results == num_outputs + len(updates), "results are missing"
        return Lowered(_renamed(str(module)), results, updates, num_results)


def _renamed(text: str) -> str:
    """Numbers the functions, so that equal programs have equal texts."""
    # The bridge takes their names from TensorFlow, which numbers all functions
    # of the process.
    text = re.sub(r"module @\S+", "module @replicas", text, count=1)
    names = re.findall(r"func\.func private @([\w.$-]+)\(", text)
    numbered = {name: f"function{index}" for index, name in enumerate(names)}
    return re.sub(
        r"@([\w.$-]+)", lambda m: f"@{numbered.get(m[1], m[1])}", text
    )


def _main(module: tpu_simulation.ir.Module) -> Any:
    """Returns the main function, an operation of MLIR's dialect `func`."""
    for operation in module.body.operations:
        if operation.operation.name == "func.func":
            if operation.name.value == "main":
                return operation
    raise AssertionError("the bridge's module has no main function")


def _check_parameters(
    main: Any,
    program: replicated_program.ReplicatedProgram,
    specs: Sequence[tf.TensorSpec],
) -> None:
    """Asserts that arguments come first, then variables as captured."""
    expected = [*specs, *(v.spec for v in program.variables)]
    assert len(main.type.inputs) == len(expected), "parameters are missing"
    for parameter, spec in zip(main.type.inputs, expected, strict=True):
        # For types that XLA names differently (float8), check only the shape.
        element = _ELEMENT_TYPES.get(
            spec.dtype.name, str(parameter.element_type)
        )
        assert (list(parameter.shape), str(parameter.element_type)) == (
            spec.shape.as_list(),
            element,
        ), f"the bridge's parameter is {parameter}, expected {spec}"


def _aliases(module: tpu_simulation.ir.Module) -> list[tuple[int, int]]:
    """Pairs each parameter with the result that updates it."""
    key = "mhlo.input_output_alias"
    if key not in module.operation.attributes:
        return []
    pairs = []
    ir = tpu_simulation.ir
    for entry in module.operation.attributes[key]:
        alias = entry["alias"]
        pairs.append(
            (
                ir.IntegerAttr(alias["parameter_number"]).value,
                list(ir.DenseI64ArrayAttr(entry["output_index"]) or [0])[0],
            )
        )
    return pairs
