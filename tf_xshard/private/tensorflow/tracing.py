"""What is being traced: XLA, replicas, loops, variables that are new."""

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
        # The thread that traces a replica, with `graph`, that of the replica
        # function. The graphs between it and the current one decide if replicas
        # can communicate: `is_control_flow_graph` of a FuncGraph, and the class
        # below.
        "thread": _PYTHON + "distribute.mirrored_run._MirroredReplicaThread",
        "loop_body": (
            _PYTHON + "ops.control_flow_v2_func_graphs.WhileBodyFuncGraph"
        ),
    },
)
_TRACE = names.PrivateNames(
    "An optimizer that is first used in a tf.function",
    {
        # The trace that creates variables (`_initialize`, with their initial
        # values in its argument `add_initializers_to`), what initializes them
        # after it, and its error.
        "Function": _FUNCTION,
        "initialize": _FUNCTION + "._initialize",
        "initialize_variables": (
            _FUNCTION + "._initialize_uninitialized_variables"
        ),
        "UnliftableError": _PYTHON + "eager.lift_to_graph.UnliftableError",
    },
)
# Of TPUExtended since TF 1.12; there is no public accessor. Present in 2.20 to
# 2.22.
names.attributes("Groups under TPUStrategy", "_device_assignment")


def has_device_assignment(strategy: tf.distribute.Strategy) -> bool:
    """Whether a TPUStrategy fixed XLA's replica numbering.

    If not, XLA's replica ids may differ from `replica_id_in_sync_group`.
    """
    return strategy.extended._device_assignment is not None


def initialize_new_variables() -> None:
    """Initializes the variables that the function being traced has created.

    A tf.function initializes them after its trace; until then they have no
    values, which some optimizers copy when they are built.
    """
    # Nothing else leads to the function that is being traced, nor to what it
    # will initialize.
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
                return  # A value depends on the function's arguments.


def in_xla() -> bool:
    """Whether XLA will compile what is being traced."""
    return tf.__internal__.get_enclosing_xla_context() is not None


def replica_graph() -> tf.Graph:
    """The graph of the replica function that this thread traces.

    Under MirroredStrategy and MultiWorkerMirroredStrategy every replica is
    traced by a separate thread.
    """
    thread = threading.current_thread()
    assert isinstance(thread, _REPLICAS.thread), thread
    return thread.graph


def is_loop_body(graph: tf.Graph) -> bool:
    """Whether a graph is the body of a `tf.while_loop`."""
    return isinstance(graph, _REPLICAS.loop_body)
