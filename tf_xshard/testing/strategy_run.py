"""Replaces `strategy.run()` under a simulated strategy.

trace -> replicated_program.extract -> execution.emit, or capture()
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.private.jax import tpu_simulation
from tf_xshard.testing import execution
from tf_xshard.testing import replicated_program

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
                " the function given to run(): take off jit_compile=True (for a"
                " Keras model: compile(jit_compile=False))."
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
        return execution.emit(extraction, traced, self._xla_numbering)


def _without_gradient(value: tf.Tensor) -> tf.Tensor:
    """Prevents a returned value from having a gradient, as on a TPU."""
    return tf.raw_ops.PreventGradient(
        input=value,
        message="the GradientTape is outside strategy.run(). What a TPU program"
        " returns has no gradient (TPUReplicatedOutput): open the GradientTape"
        " in the function given to strategy.run().",
    )
