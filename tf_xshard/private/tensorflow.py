"""Names that TensorFlow does not export and this package depends on.

Only the modules of this folder may use such names.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator

import tensorflow as tf

from tf_xshard.private import names

_PYTHON = "tensorflow.python."
_CONTEXT = _PYTHON + "eager.context.Context."
_FUNCTION = _PYTHON + "eager.polymorphic_function.polymorphic_function.Function"
# Present in TensorFlow 2.20 to 2.22, as are the names below.
_XLA = names.PrivateNames(
    "An optimizer step that XLA compiles",
    {
        # XLA can't compile tf.unique (its output shape depends on data), so
        # IndexedSlices must be made dense there; no public API says whether XLA
        # compiles.
        "in_context": (
            _PYTHON + "ops.control_flow_util.GraphOrParentsInXlaContext"
        ),
    },
)
_STORE = names.PrivateNames(
    "An optimizer under MultiWorkerMirroredStrategy",
    {
        # The key-value store of the coordination service that
        # MultiWorkerMirroredStrategy starts. Workers exchange there, while they
        # trace, which variables have a gradient. A collective would not do: its
        # error does not say which worker was missing.
        "context": _PYTHON + "eager.context.context",
        "set": _CONTEXT + "set_config_key_value",
        "get": _CONTEXT + "get_config_key_value",
        "delete": _CONTEXT + "delete_config_key_value",
    },
)
_TIMEOUT = names.PrivateNames(
    "The timeout of collectives",
    {
        "context": _PYTHON + "eager.context.context",
        # Ends collectives that wait for missing peers.
        "abort": _CONTEXT + "abort_collective_ops",
        # Where a thread is while TensorFlow runs a function for it:
        # distinguishes a waiting batch from one that is traced.
        "execute": _PYTHON + "eager.execute",
        "quick_execute": _PYTHON + "eager.execute.quick_execute",
    },
)
# The argument of `quick_execute` with a function's inputs, also captured ones.
_INPUTS = "inputs"
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
_AUTOGRAPH = names.PrivateNames(
    "An optimizer in a tf.function",
    {
        # Marks a function that AutoGraph calls unconverted. do_not_convert does
        # so, too, but hides whether the caller is converted, which hooks need.
        "artifact": _PYTHON + "autograph.impl.api.autograph_artifact",
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


def has_device_assignment(strategy: tf.distribute.Strategy) -> bool:
    """Whether a TPUStrategy fixed XLA's replica numbering.

    If not, XLA's replica ids may differ from `replica_id_in_sync_group`.
    """
    # The attribute has been named `_device_assignment` since TPUStrategy came
    # to TF 1.12; there is no public accessor.
    return strategy.extended._device_assignment is not None


def initialize_new_variables() -> None:
    """Initializes the variables that the function being traced has created.

    A tf.function initializes them after its trace; until then they have no
    values, which some optimizers copy when they are built.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
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
        frame = frame.f_back


def in_xla() -> bool:
    """Whether XLA will compile what is being traced."""
    return _XLA.in_context(tf.compat.v1.get_default_graph())


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


def publish(key: str, value: str) -> None:
    """Puts a value into the cluster's key-value store."""
    _STORE.set(_STORE.context(), key, value)


_LOOKUP_SLICE_SECONDS = 5.0


def lookup(key: str, timeout_seconds: float) -> str:
    """Waits for a value in the cluster's key-value store.

    Raises:
      tf.errors.OpError: If it does not arrive in time or a worker is gone.
    """
    # In slices: the time in which this process is stopped does not count.
    remaining = max(timeout_seconds, 0.001)
    while True:
        seconds = min(remaining, _LOOKUP_SLICE_SECONDS)
        remaining -= seconds
        try:
            return _STORE.get(
                _STORE.context(), key, max(1, int(seconds * 1000))
            )
        except tf.errors.DeadlineExceededError:
            if remaining <= 0:
                raise


def withdraw(key: str) -> None:
    """Removes a value from the cluster's key-value store."""
    _STORE.delete(_STORE.context(), key)


def context() -> object:
    """TensorFlow's runtime context: another object after it has been reset."""
    return _TIMEOUT.context()


def abort_collectives(message: str) -> None:
    """Makes every current and future collective of this process fail."""
    _TIMEOUT.abort(_TIMEOUT.context(), tf.errors.DEADLINE_EXCEEDED, message)


def _executing() -> Iterator[types.FrameType]:
    """The frames in which other threads wait for TensorFlow to execute."""
    for thread, frame in sys._current_frames().items():
        if (
            thread != threading.get_ident()
            and frame.f_code.co_filename == _TIMEOUT.execute.__file__
        ):
            yield frame


def a_function_runs() -> bool:
    """Whether TensorFlow executes (not just traces) a function for a thread."""
    return any(True for _ in _executing())


def a_function_uses(handle: tf.Tensor) -> bool:
    """Whether another thread waits for a function that captured a handle.

    Args:
      handle: An eager tensor.

    Returns:
      A bool; True if that can't be seen, as while TensorFlow is asynchronous.
    """
    return not tf.config.experimental.get_synchronous_execution() or any(
        any(one is handle for one in frame.f_locals.get(_INPUTS, ()))
        for frame in _executing()
    )


# Code that calls for a function that AutoGraph has converted.
_CONVERTING = tuple(
    os.path.join(os.path.dirname(tf.__file__), "python", *path)
    for path in (("autograph", "impl", "api.py"), ("distribute", ""))
)
_caller = threading.local()


def entry_point(function: Callable) -> Callable:
    """Makes AutoGraph skip a function that a user's `tf.function` calls.

    Otherwise AutoGraph would convert all code of this package that a step
    calls, which adds seconds to the first trace and changes nothing. Functions
    passed in by the user are converted separately: see `as_called_by_user`.

    Args:
      function: A function or method of this package.

    Returns:
      A function with the same signature.
    """
    unconverted = tf.autograph.experimental.do_not_convert(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        # An entry point inside another is called by this package.
        if getattr(_caller, "convert", None) is not None:
            return unconverted(*args, **kwargs)
        if not tf.executing_eagerly():
            _AUTOGRAPH.check()
        _caller.convert = _as_it_is
        # Converted code calls through AutoGraph's module. Its context does not
        # help: in a replica's thread it is always UNSPECIFIED.
        # strategy.run(optimizer.apply) calls it from TensorFlow's own code.
        if sys._getframe(1).f_code.co_filename.startswith(_CONVERTING) and (
            not tf.executing_eagerly()
        ):
            _caller.convert = functools.partial(
                tf.__internal__.autograph.tf_convert,
                ctx=tf.__internal__.autograph.control_status_ctx(),
            )
        try:
            return unconverted(*args, **kwargs)
        finally:
            _caller.convert = None

    # Without it, the first call in a graph fails, not the import.
    return call if _AUTOGRAPH.missing() else _AUTOGRAPH.artifact(call)


def as_called_by_user(function: Callable) -> Callable:
    """Converts a user's function the way the user's own calls are.

    Args:
      function: A function passed in by the user, such as `pre_reduce`.

    Returns:
      It, converted by AutoGraph if the caller of the entry point is.
    """
    convert = getattr(_caller, "convert", None)
    return convert(function) if convert else function


def _as_it_is(function: Callable) -> Callable:
    return function
