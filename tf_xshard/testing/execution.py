"""Runs a replicated program in the user's graph, instead of `strategy.run`.

host's operations -> read variables -> [ lower, compile, execute ] -> assign
                                        tf.numpy_function
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_xshard.private.jax import tpu_simulation
from tf_xshard.testing import replicated_program
from tf_xshard.testing import stablehlo
from tf_xshard.testing import xla_cpu

_Shapes = tuple[tuple[int, ...], ...]


def emit(
    extraction: replicated_program.Extraction,
    traced: tf.Graph,
    xla_numbering: Sequence[int],
) -> tuple[list[list[tf.Tensor]], list[tf.Operation]]:
    """Adds the execution of a program to the current graph."""
    program = extraction.program
    num_replicas = program.num_replicas
    host_side = _host_side(traced)
    arguments = host_side(extraction.arguments)
    resources = host_side(extraction.resources)
    written = [program.variables[index].spec for index in program.written]
    specs = [*program.output_specs, *written]
    if not specs:
        return [[] for _ in range(num_replicas)], []
    runner = _ProgramRunner(program, xla_numbering, traced)
    runner.lower_early([per_replica[0].shape for per_replica in arguments])
    values = [
        tf.raw_ops.ReadVariableOp(resource=resource, dtype=variable.spec.dtype)
        for variable, per_replica in zip(
            program.variables, resources, strict=True
        )
        for resource in per_replica
    ]
    flat = tf.numpy_function(
        _bound_to_current_graph(runner),
        [tensor for per_replica in arguments for tensor in per_replica]
        + values,
        [spec.dtype for spec in specs for _ in range(num_replicas)],
        name="simulated_tpu",
    )
    by_result = [
        flat[start : start + num_replicas]
        for start in range(0, len(flat), num_replicas)
    ]
    for spec, per_replica in zip(specs, by_result, strict=True):
        for tensor in per_replica:
            tensor.set_shape(spec.shape)
    num_outputs = len(program.output_specs)
    assignments = [
        tf.raw_ops.AssignVariableOp(resource=resource, value=value)
        for index, new_values in zip(
            program.written, by_result[num_outputs:], strict=True
        )
        for resource, value in zip(resources[index], new_values, strict=True)
    ]
    outputs = [
        [by_result[index][replica] for index in range(num_outputs)]
        for replica in range(num_replicas)
    ]
    return outputs, assignments


def _bound_to_current_graph(
    runner: _ProgramRunner,
) -> Callable[..., list[np.ndarray]]:
    """Returns a function that calls the runner while the graph lives."""
    # `tf.numpy_function` never frees its function. The global default graph
    # keeps the function, even if a `tf.function` calls it, so the function
    # holds the runner only weakly.
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        # Keep the runner in each graph up to the outermost graph. A tf.function
        # that is traced inside another tf.function keeps its trace when the
        # outer graph is gone.
        runners = getattr(graph, "simulated_tpu_runners", [])
        graph.simulated_tpu_runners = [*runners, runner]
        outer = getattr(graph, "outer_graph", None)
        is_function = isinstance(outer, tf.__internal__.FuncGraph)
        graph = outer if is_function else None
    reference = weakref.ref(runner)

    def run(*values):
        runner = reference()
        assert runner is not None, "the graph that runs is gone"
        return runner(*values)

    return run


def _host_side(
    traced: tf.Graph,
) -> Callable[[Sequence[Sequence[tf.Tensor]]], list[list[tf.Tensor]]]:
    """Returns a function that rebuilds the host's operations (padding)."""
    captured = {inside.name: outside for outside, inside in traced.captures}

    def rebuilt(groups):
        wanted = {t.name: t for ts in groups for t in ts}
        needed = _ancestors(
            [t for name, t in wanted.items() if name not in captured]
        )
        tensors = dict(captured)
        if needed:
            graph_def = traced.as_graph_def()
            keep = {o.name for o in needed}
            nodes = [n for n in graph_def.node if n.name in keep]
            del graph_def.node[:]
            graph_def.node.extend(nodes)
            names = [name for name in wanted if name not in captured]
            used = {
                t.name for o in needed for t in o.inputs if t.name in captured
            }
            imported = tf.graph_util.import_graph_def(
                graph_def,
                input_map={name: captured[name] for name in used},
                return_elements=names,
                name="host",
            )
            tensors.update(zip(names, imported, strict=True))
        return [[tensors[t.name] for t in ts] for ts in groups]

    return rebuilt


def _ancestors(tensors: Iterable[tf.Tensor]) -> set[tf.Operation]:
    """Finds the operations that compute tensors (of any shape)."""
    found: set[tf.Operation] = set()
    pending = [t.op for t in tensors]
    while pending:
        operation = pending.pop()
        if operation in found or operation.type == "Placeholder":
            continue
        found.add(operation)
        pending += [t.op for t in operation.inputs]
        pending += operation.control_inputs
    return found


class _ProgramRunner:
    """Lowers, compiles and executes a program, inside `tf.numpy_function`."""

    def __init__(
        self,
        program: replicated_program.ReplicatedProgram,
        xla_numbering: Sequence[int],
        traced: tf.Graph,
    ) -> None:
        self._traced = traced
        self._program = program
        self._xla_numbering = xla_numbering
        self._lowered: dict[_Shapes, stablehlo.Lowered] = {}
        self._lock = threading.Lock()

    def lower_early(self, shapes: Sequence[tf.TensorShape]) -> None:
        """Lowers while tracing if all shapes are known, to raise sooner."""
        if all(shape.is_fully_defined() for shape in shapes):
            self._lower(tuple(tuple(shape) for shape in shapes))

    def _lower(self, shapes: _Shapes) -> stablehlo.Lowered:
        with self._lock:
            if shapes not in self._lowered:
                self._lowered[shapes] = stablehlo.lower(self._program, shapes)
            return self._lowered[shapes]

    def __call__(self, *values: np.ndarray) -> list[np.ndarray]:
        """Executes the program."""
        program = self._program
        num_replicas = program.num_replicas
        arrays = [np.asarray(value) for value in values]
        parameters = [
            arrays[start : start + num_replicas]
            for start in range(0, len(arrays), num_replicas)
        ]
        num_arguments = len(program.argument_specs)
        _check_shapes(parameters)
        lowered = self._lower(
            tuple(vs[0].shape for vs in parameters[:num_arguments])
        )
        try:
            executable = xla_cpu.compiled(lowered.text, num_replicas)
        except RuntimeError as error:
            raise NotImplementedError(
                "XLA:CPU can't compile the function given to strategy.run(). If"
                " shapes are dynamic, batch with drop_remainder=True. XLA's"
                f" error: {error}"
            ) from error
        numbering = self._xla_numbering
        results = executable(
            [[vs[replica] for replica in numbering] for vs in parameters]
        )
        position = {replica: xla for xla, replica in enumerate(numbering)}
        results = [
            [vs[position[replica]] for replica in range(num_replicas)]
            for vs in results
        ]
        outputs = []
        for output in lowered.outputs:
            for replica in range(num_replicas):
                value = results[output.data][replica]
                if output.sizes is not None:
                    sizes = results[output.sizes][replica]
                    value = value[tuple(slice(size) for size in sizes)]
                outputs.append(value)
        for index in program.written:
            if index in lowered.updates:
                outputs += results[lowered.updates[index]]
            else:
                outputs += parameters[num_arguments + index]
        return outputs


def _check_shapes(parameters: list[list[np.ndarray]]) -> None:
    for values in parameters:
        shapes = [value.shape for value in values]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"The replicas hold arrays of different shapes: {shapes}."
                " TPUStrategy pads dense tensors (unless"
                " experimental_enable_dynamic_batch_size is off), but not the"
                " components of RaggedTensors and SparseTensors. Pad them, or"
                " make them dense, before strategy.run()."
            )


# Each thread's pairs of a runner (None for any runner) and its programs.
_captures = threading.local()


@contextlib.contextmanager
def capture(
    runner: Runner | None,
) -> Iterator[list[replicated_program.Extraction]]:
    """Collects the programs that are traced inside, without executing them."""
    programs: list[replicated_program.Extraction] = []
    before = getattr(_captures, "active", ())
    _captures.active = (*before, (runner, programs))
    try:
        yield programs
    finally:
        _captures.active = before


class Runner:
    """Executes the programs that a strategy traces, or captures them."""

    def __init__(self, xla_numbering: Sequence[int]) -> None:
        self._xla_numbering = xla_numbering

    def __call__(self, replicate: Callable[[], Any]) -> Any:
        """Traces a program as TPUStrategy does, and executes it."""
        if tf.__internal__.get_enclosing_xla_context() is not None:
            raise NotImplementedError(
                "strategy.run() is called inside a"
                " tf.function(jit_compile=True). TPUStrategy itself compiles"
                " the function given to run(). Remove jit_compile=True; for a"
                " Keras model, pass jit_compile=False to compile()."
            )
        traced = tf.__internal__.FuncGraph("replicated")
        with (
            traced.as_default(),
            tpu_simulation.AutomaticControlDependencies(),
        ):
            results = replicate()
        outputs, done = self._execute(traced)
        positions = replicated_program.output_positions(traced)

        def result_of(value):
            if isinstance(value, tf.Operation):
                return tf.no_op()
            if not tf.is_tensor(value):
                return value
            if outputs is None:  # Nothing executes; only the type matters.
                return tf.zeros([s or 1 for s in value.shape], value.dtype)
            while value.op.name not in positions:  # Skip identities.
                (value,) = value.op.inputs
            index = positions[value.op.name]
            return _without_gradient(outputs[value.value_index][index])

        with tf.control_dependencies(done):
            return tf.nest.map_structure(
                result_of, results, expand_composites=True
            )

    def _execute(
        self, traced: tf.Graph
    ) -> tuple[list[list[tf.Tensor]] | None, list[tf.Operation]]:
        """Adds the execution to the current graph."""
        if replicated_program.creates_variables(traced):
            # tf.function traces again once the variables exist. It runs this
            # graph only if it could not initialize them before the step.
            return None, [
                tf.debugging.Assert(
                    False,
                    [
                        "strategy.run() got a function that creates variables"
                        " whose initial values depend on its arguments. Create"
                        " them in strategy.scope(), before the step."
                    ],
                )
            ]
        extraction = replicated_program.extract(
            traced, len(self._xla_numbering)
        )
        for runner, programs in reversed(getattr(_captures, "active", ())):
            if runner is None or runner is self:
                programs.append(extraction)
                return None, []
        return emit(extraction, traced, self._xla_numbering)


def _without_gradient(value: tf.Tensor) -> tf.Tensor:
    """Prevents a returned value from having a gradient, as on a TPU."""
    return tf.raw_ops.PreventGradient(
        input=value,
        message="the GradientTape is outside strategy.run(). The results of a"
        " TPU program have no gradient (TPUReplicatedOutput). Open the"
        " GradientTape in the function given to strategy.run().",
    )
