"""A replicated program in StableHLO, for given shapes of its arguments.

TensorFlow's own bridge lowers it: what comes out is what a TPU would compile.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import tensorflow as tf

from tf_xshard.private import tpu_simulation
from tf_xshard.testing import replicated_program
from tf_xshard.testing import tpu_operations

_UNKNOWN = "tf_xshard.unknown"
# Long bool constants: the bridge prints a bit for each element, the parser
# wants a byte.
_BITS = re.compile(r'dense<"0x([0-9A-F]+)"> : tensor<([0-9x]+)xi1>')
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
    """Where one output of the program is among the results.

    Attributes:
      data: The index of its values.
      sizes: The index of its true shape if that is dynamic (the values are
        padded then), else None.
    """

    data: int
    sizes: int | None


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program in StableHLO.

    Attributes:
      text: The module. Its parameters are the program's arguments, then its
        variables; its results are listed below.
      outputs: One `Result` for each output of the program.
      updates: From the index of a variable to the index of its new value among
        the results, for those that the program writes.
      num_results: How many results there are.
    """

    text: str
    outputs: tuple[Result, ...]
    updates: dict[int, int]
    num_results: int


def lower(
    program: replicated_program.ReplicatedProgram,
    shapes: tuple[tuple[int, ...], ...],
) -> Lowered:
    """Lowers a program with TensorFlow's bridge to XLA.

    Args:
      program: What the replicas run.
      shapes: The shape of each argument.

    Returns:
      The program in StableHLO.

    Raises:
      NotImplementedError: If an operation can't be compiled by XLA.
    """
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
                "XLA can't compile what strategy.run() got. A TPU refuses it,"
                " too, or leaves the operation to its host (automatic outside"
                f" compilation), which is not simulated. XLA's error: {error}"
            ) from error
    return _finish(text, program, specs, tuple(results))


def _import(program, tensors, results) -> list[tf.Tensor]:
    """Builds the program's graph; fills `results`, returns the outputs."""
    wanted = [name for name in program.output_names if name not in tensors]
    imported = tf.graph_util.import_graph_def(
        program.graph_def,
        input_map=tensors,
        return_elements=wanted,
        name="",
    )
    tensors = {**tensors, **dict(zip(wanted, imported, strict=True))}
    outputs = []
    for name in program.output_names:
        output = tf.identity(tensors[name])
        if output.shape.rank is None:
            raise NotImplementedError(
                f"strategy.run() returns a tensor of unknown rank ({name})."
                " Give it a shape."
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


def _finish(text, program, specs, results) -> Lowered:
    with tpu_simulation.make_ir_context():
        module = _parsed(text)
        num_outputs = sum(1 if r.sizes is None else 2 for r in results)
        main = _main(module)
        _check_parameters(main, program, specs)
        updates = {}
        for alias in _aliases(module):
            parameter, output = alias
            variable = parameter - len(specs)
            assert program.variables[variable].is_written, variable
            updates[variable] = output
        num_results = len(main.type.results)
        assert num_results == num_outputs + len(updates), "other results"
        return Lowered(_renamed(str(module)), results, updates, num_results)


def portable(text: str) -> str:
    """A module of the bridge in StableHLO that every compiler takes.

    Args:
      text: What the bridge printed.

    Returns:
      The module without operations of other dialects.
    """
    with tpu_simulation.make_ir_context():
        return str(_parsed(text))


def _parsed(text: str):
    # The bridge has no name for HLO's dynamic-reshape, and the parser takes
    # none that it does not know.
    text = text.replace(
        '"mhlo.unknown"(', f"stablehlo.custom_call @{_UNKNOWN}("
    )
    text = _BITS.sub(_bytes_of_bits, text)
    module = tpu_simulation.ir.Module.parse(text)
    _replace_custom_calls(module)
    return module


def _bytes_of_bits(match: re.Match) -> str:
    shape = [int(size) for size in match[2].split("x")]
    bits = np.unpackbits(
        np.frombuffer(bytes.fromhex(match[1]), np.uint8),
        count=math.prod(shape),
        bitorder="little",
    )
    return f'dense<"0x{bits.tobytes().hex().upper()}"> : tensor<{match[2]}xi1>'


def _renamed(text: str) -> str:
    """Numbers the functions, so that equal programs have equal texts.

    The bridge names them after TensorFlow's, which count through the process.
    """
    text = re.sub(r"module @\S+", "module @replicas", text, count=1)
    names = re.findall(r"func\.func private @([\w.$-]+)\(", text)
    numbered = {name: f"function{index}" for index, name in enumerate(names)}
    return re.sub(
        r"@([\w.$-]+)", lambda m: f"@{numbered.get(m[1], m[1])}", text
    )


def _main(module):
    for operation in module.body.operations:
        if operation.operation.name == "func.func":
            if operation.name.value == "main":
                return operation
    raise AssertionError("the bridge's module has no main function")


def _check_parameters(main, program, specs) -> None:
    """The bridge takes arguments first and variables in order of capture."""
    expected = [*specs, *(v.spec for v in program.variables)]
    assert len(main.type.inputs) == len(expected), "parameters are missing"
    for parameter, spec in zip(main.type.inputs, expected, strict=True):
        # Of types that XLA names otherwise (float8) the shape is compared.
        element = _ELEMENT_TYPES.get(
            spec.dtype.name, str(parameter.element_type)
        )
        assert (list(parameter.shape), str(parameter.element_type)) == (
            spec.shape.as_list(),
            element,
        ), f"the bridge has other parameters: {parameter}, expected {spec}"


def _aliases(module) -> list[tuple[int, int]]:
    """Pairs of a parameter and the result that updates it."""
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


def _replace_custom_calls(module) -> None:
    """Writes StableHLO where the bridge left a stand-in."""
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


def _replacement(operation):
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


def _dynamic_reshape(operation):
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
