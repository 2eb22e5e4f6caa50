"""Extracts the program that `TPUStrategy.run` traced from its graph.

    strategy.run(fn, args) -> padding -> [ the replicas' program ] -> results
                              (host)       (_tpu_replicate ops)

`tf.distribute.TPUStrategy` marks every operation of the replicas' program with
the attribute `_tpu_replicate`. These operations become a separate GraphDef, in
which XLA's operations replace operations that only a TPU has.

Operations and resources that the simulated TPU does not have raise an error.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import tensorflow as tf

from tf_xshard.private.jax import tpu_simulation
from tf_xshard.testing import tpu_operations

_EMBEDDING_CORES = "TPU embedding (its embedding cores)"
_UNSUPPORTED = {
    "EagerPyFunc": "tf.py_function",
    "InfeedDequeue": "infeed",
    "InfeedDequeueTuple": "infeed",
    "OutfeedEnqueue": "outfeed",
    "OutfeedEnqueueTuple": "outfeed",
    "PrintV2": "tf.print",
    "PyFunc": "tf.numpy_function",
    "PyFuncStateless": "tf.numpy_function",
    "RecvTPUEmbeddingActivations": _EMBEDDING_CORES,
    "SendTPUEmbeddingGradients": _EMBEDDING_CORES,
    "StringFormat": "tf.strings.format (tf.print)",
    "TPUEmbeddingActivations": _EMBEDDING_CORES,
    "TPUPartitionedInput": "model parallelism (several cores per replica)",
    "TPUPartitionedInputV2": "model parallelism (several cores per replica)",
    "XlaRecvTPUEmbeddingActivations": _EMBEDDING_CORES,
    "XlaSendTPUEmbeddingGradients": _EMBEDDING_CORES,
}


def variable_spec(resource: tf.Tensor) -> tf.TensorSpec:
    """Returns the shape and dtype of the variable behind a resource."""
    source = resource
    if resource.op.type == "TPUReplicatedInput":
        source = resource.op.inputs[0]
    spec = tpu_simulation.variable_spec(source)
    if spec is None:
        raise NotImplementedError(
            "The step uses a resource that is not a variable"
            f" ({resource.name!r}), such as a table or an iterator. A TPU can't"
            " hold it. Move it out of the function given to strategy.run()."
        )
    if resource.op.type != "TPUReplicatedInput":
        raise NotImplementedError(
            f"The step uses a variable of shape {spec.shape} and dtype"
            f" {spec.dtype.name} that was created outside strategy.scope(), or"
            f" in another strategy's scope ({resource.name!r}). TPU cores can't"
            " access it. Create it inside the scope."
        )
    if not spec.shape.is_fully_defined():
        raise NotImplementedError(
            f"The step uses a variable of unknown shape {spec.shape}"
            f" ({resource.name!r}). XLA needs the shape: create the variable"
            " with a shape that is fully defined."
        )
    return spec


def check_operations(inside: Sequence[tf.Operation], graph: tf.Graph) -> None:
    """Checks that XLA:CPU can execute the operations of a program."""
    library = graph.as_graph_def().library.function
    nodes = itertools.chain(
        (o.node_def for o in inside), *(f.node_def for f in library)
    )
    for node in nodes:
        construct = _UNSUPPORTED.get(node.op)
        if any(
            name in node.attr for name in tpu_simulation.OUTSIDE_COMPILATION
        ):
            construct = "outside compilation"
        if construct is not None:
            raise NotImplementedError(
                f"The step contains {construct} ({node.op} {node.name!r}). On a"
                " TPU, its host or cores of another kind execute it; the"
                " simulated TPU (XLA:CPU) has neither. Move it out of the"
                " function given to strategy.run()."
            )


# These operations describe the program to a TPU's runtime, and compute nothing.
_METADATA = ("TPUReplicateMetadata", "TPUCompilationResult")
_unique = itertools.count()


@dataclasses.dataclass(frozen=True)
class Variable:
    """Describes a variable that the replicas' program captures."""

    # The name of the variable's resource in the program's graph.
    name: str
    spec: tf.TensorSpec
    # True if the program may assign to the variable.
    is_written: bool


@dataclasses.dataclass(frozen=True)
class ReplicatedProgram:
    """Holds one program for all replicas, as TPUStrategy traced it."""

    # The program's operations, in the order of their creation.
    graph_def: tf.compat.v1.GraphDef
    # The tensors that are fed, with a value per replica. In these shapes, and
    # in the shapes of the outputs, dimensions may be unknown.
    argument_names: tuple[str, ...]
    argument_specs: tuple[tf.TensorSpec, ...]
    variables: tuple[Variable, ...]
    # The tensors that the program returns on each replica.
    output_names: tuple[str, ...]
    output_specs: tuple[tf.TensorSpec, ...]
    num_replicas: int

    @property
    def written(self) -> tuple[int, ...]:
        """The indices of the variables that may be written."""
        return tuple(
            index for index, v in enumerate(self.variables) if v.is_written
        )


@dataclasses.dataclass(frozen=True)
class Extraction:
    """Holds a program, and its inputs in the graph that was traced."""

    program: ReplicatedProgram
    # Each argument's tensor on each replica, all of the shape in
    # `program.argument_specs`.
    arguments: tuple[tuple[tf.Tensor, ...], ...]
    # Each variable's resource (a scalar) on each replica.
    resources: tuple[tuple[tf.Tensor, ...], ...]


def creates_variables(graph: tf.Graph) -> bool:
    """Returns True if a traced program creates and initializes variables."""
    return any(
        o.type == "VarIsInitializedOp" and _is_marked(o)
        for o in graph.get_operations()
    )


def extract(graph: tf.Graph, num_replicas: int) -> Extraction:
    """Extracts the replicas' program from a traced graph."""
    operations = graph.get_operations()
    inside = [
        o for o in operations if _is_marked(o) and o.type not in _METADATA
    ]
    outputs = [o.inputs[0] for o in operations if _is_output(o)]
    inside = _alive(inside, outputs)
    check_operations(inside, graph)
    names = {o.name for o in inside}
    boundary = {
        tensor.name: tensor
        for o in inside
        for tensor in o.inputs
        if tensor.op.name not in names
    }
    written = {
        _root(tensor, names).name
        for o in inside
        for tensor in tpu_simulation.written_resources(o)
        if o.type != "Identity"
    }
    arguments = [t for t in boundary.values() if t.dtype != tf.resource]
    resources = [t for t in boundary.values() if t.dtype == tf.resource]
    variables = tuple(
        Variable(t.name, variable_spec(t), t.name in written) for t in resources
    )
    program = ReplicatedProgram(
        graph_def=_graph_def(graph, names),
        argument_names=tuple(t.name for t in arguments),
        argument_specs=tuple(
            tf.TensorSpec(t.shape, t.dtype) for t in arguments
        ),
        variables=variables,
        output_names=tuple(t.name for t in outputs),
        output_specs=tuple(tf.TensorSpec(t.shape, t.dtype) for t in outputs),
        num_replicas=num_replicas,
    )
    tpu_simulation.register_functions(
        program, program.graph_def.library.function
    )
    return Extraction(
        program,
        tuple(_per_replica(t, num_replicas) for t in arguments),
        tuple(_per_replica(t, num_replicas) for t in resources),
    )


def output_positions(graph: tf.Graph) -> dict[str, int]:
    """Returns the index of each TPUReplicatedOutput among the outputs."""
    outputs = filter(_is_output, graph.get_operations())
    return {operation.name: index for index, operation in enumerate(outputs)}


def _alive(
    inside: Sequence[tf.Operation], outputs: Sequence[tf.Tensor]
) -> list[tf.Operation]:
    """Returns operations that a TPU would run, used or with side effects."""
    candidates = set(inside)
    alive: set[tf.Operation] = set()
    pending = [o for o in inside if o.op_def.is_stateful]
    pending += [t.op for t in outputs]
    while pending:
        operation = pending.pop()
        if operation not in candidates or operation in alive:
            continue
        alive.add(operation)
        pending += [t.op for t in operation.inputs]
        pending += operation.control_inputs
    return [o for o in inside if o in alive]


def _is_marked(operation: tf.Operation) -> bool:
    return tpu_simulation.REPLICATED in operation.node_def.attr


def _is_output(operation: tf.Operation) -> bool:
    return operation.type == "TPUReplicatedOutput"


def _root(tensor: tf.Tensor, names: set[str]) -> tf.Tensor:
    """Follows a resource (a scalar) to its tensor outside the program."""
    while tensor.op.name in names and tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _per_replica(tensor: tf.Tensor, num_replicas: int) -> tuple[tf.Tensor, ...]:
    """Returns a tensor on each replica, of the same shape."""
    if tensor.op.type == "TPUReplicatedInput":
        return tuple(tensor.op.inputs)
    return (tensor,) * num_replicas


def _graph_def(graph: tf.Graph, names: set[str]) -> tf.compat.v1.GraphDef:
    full = graph.as_graph_def(add_shapes=True)
    program = tf.compat.v1.GraphDef(
        versions=full.versions, library=full.library
    )
    for node in full.node:
        if node.name in names:
            kept = [
                name
                for name in node.input
                if not name.startswith("^") or name[1:] in names
            ]
            program.node.add().CopyFrom(node)
            del program.node[-1].input[:]
            program.node[-1].input.extend(kept)
    # The runtime already has the unchanged functions under the old names.
    suffix = f"__on_replica_{next(_unique)}"
    renamed = {
        f.signature.name: f.signature.name + suffix
        for f in program.library.function
    }
    for function in program.library.function:
        function.signature.name = renamed[function.signature.name]
        tpu_operations.rewrite(function.node_def, renamed, function)
    for gradient in program.library.gradient:
        gradient.function_name = renamed[gradient.function_name]
        gradient.gradient_func = renamed[gradient.gradient_func]
    tpu_operations.rewrite(program.node, renamed)
    return program
