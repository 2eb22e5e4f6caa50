"""Describes the running trace: XLA, replicas, loops, new variables."""

from __future__ import annotations

import threading

import tensorflow as tf

from tf_xshard.private import frames
from tf_xshard.private import names

_PYTHON = "tensorflow.python."
_FUNCTION = _PYTHON + "eager.polymorphic_function.polymorphic_function.Function"
# Present in TensorFlow 2.20 to 2.22.
_REPLICAS = names.PrivateNames(
    "An optimizer under MirroredStrategy",
    {
        # The thread that traces a replica. Its `graph` is the graph of the
        # replica function. The graphs between that graph and the current graph
        # decide if replicas can communicate. A FuncGraph's
        # `is_control_flow_graph` and the class below say what each graph is.
        "thread": _PYTHON + "distribute.mirrored_run._MirroredReplicaThread",
        "loop_body": (
            _PYTHON + "ops.control_flow_v2_func_graphs.WhileBodyFuncGraph"
        ),
    },
)
_TRACE = names.PrivateNames(
    "An optimizer that is first used in a tf.function",
    {
        # `_initialize` is the trace that creates variables. Its argument
        # `add_initializers_to` has their initial values. The next method
        # initializes them after the trace, and may raise UnliftableError.
        "Function": _FUNCTION,
        "initialize": _FUNCTION + "._initialize",
        "initialize_variables": (
            _FUNCTION + "._initialize_uninitialized_variables"
        ),
        "UnliftableError": _PYTHON + "eager.lift_to_graph.UnliftableError",
    },
)
_CALLBACKS = names.PrivateNames(
    'Communication(dtype="int8")',
    {
        # Operations that are added to each operation, as by
        # tf.debugging.enable_check_numerics. XLA has no kernels for them.
        "are_called": (
            _PYTHON + "framework.op_callbacks.should_invoke_op_callbacks"
        ),
    },
)
# TPUExtended has this attribute since TF 1.12, without a public accessor.
# Present in 2.20 to 2.22.
names.attributes("Groups under TPUStrategy", "_device_assignment")


def has_device_assignment(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if a TPUStrategy fixed XLA's replica numbering.

    If not, XLA's replica ids may differ from `replica_id_in_sync_group`.
    """
    return strategy.extended._device_assignment is not None


def initialize_new_variables() -> None:
    """Initializes the variables that the function being traced has created.

    A tf.function initializes its variables after its trace. Until then they
    have no values, but some optimizers copy values when they are built.
    """
    # Only the frames lead to the function that is being traced, and to the
    # variables that it will initialize.
    for frame in frames.callers():
        function = frame.f_locals.get("self")
        if isinstance(function, _TRACE.Function) and (
            frame.f_code is _TRACE.initialize.__code__
        ):
            try:
                function._initialize_uninitialized_variables(
                    frame.f_locals["add_initializers_to"]
                )
            except _TRACE.UnliftableError:
                return  # A value depends on the arguments of the function.


def in_xla() -> bool:
    """Returns True if XLA will compile the function that is being traced."""
    return tf.__internal__.get_enclosing_xla_context() is not None


def has_debugger() -> bool:
    """Returns True if tf.debugging adds operations that XLA can't compile."""
    return bool(_CALLBACKS.are_called())


def replica_graph() -> tf.Graph:
    """Returns the graph of the replica function that this thread traces.

    Under MirroredStrategy and MultiWorkerMirroredStrategy, a separate thread
    traces each replica.
    """
    thread = threading.current_thread()
    assert isinstance(thread, _REPLICAS.thread), thread
    return thread.graph


def is_loop_body(graph: tf.Graph) -> bool:
    """Returns True if a graph is the body of a `tf.while_loop`."""
    return isinstance(graph, _REPLICAS.loop_body)
