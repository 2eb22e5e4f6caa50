"""What TensorFlow says about "here": strategy, replica count, replica id.

The only module that touches names that TensorFlow does not export.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.impl import api as _autograph
from tensorflow.python.distribute import mirrored_run as _mirrored_run
from tensorflow.python.eager import context as _eager_context
from tensorflow.python.eager import execute as _eager_execute
from tensorflow.python.ops import control_flow_util as _control_flow_util
from tensorflow.python.ops import control_flow_v2_func_graphs as _func_graphs

from tf_xshard import versions

# TensorFlow's private names, each with the reason. Seen in 2.20 and 2.21.
# tests/private_names_test.py fails with the name when a version moves one.
TF_PRIVATE_NAMES = (
    # XLA can't compile tf.unique (a shape that depends on data), so
    # IndexedSlices must be made dense there; no public call tells whether XLA
    # compiles.
    (_control_flow_util, "GraphOrParentsInXlaContext"),
    # The key-value store of the coordination service that
    # MultiWorkerMirroredStrategy starts. Workers tell each other there, while
    # they trace, which variables have a gradient; no collective can, because an
    # error of one does not say which worker was missing.
    (_eager_context.Context, "set_config_key_value"),
    (_eager_context.Context, "get_config_key_value"),
    (_eager_context.Context, "delete_config_key_value"),
    # Ends collectives that wait for peers which don't come.
    (_eager_context.Context, "abort_collective_ops"),
    # Where a thread is while TensorFlow runs a function for it: what tells a
    # batch that waits from one that is traced.
    (_eager_execute, "quick_execute"),
    # The thread that traces a replica, with `graph`, the graph of the replica
    # function. What lies between that and the current graph decides whether
    # replicas can meet: `is_control_flow_graph` of a FuncGraph, and this class.
    (_mirrored_run, "_MirroredReplicaThread"),
    (_func_graphs, "WhileBodyFuncGraph"),
    # Marks a function that AutoGraph calls as it is. do_not_convert does so too,
    # but hides whether the caller is converted, which the user's hooks need.
    (_autograph, "autograph_artifact"),
)

versions.check_names(TF_PRIVATE_NAMES)

_MULTI_WORKER = (
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.experimental.MultiWorkerMirroredStrategy,
)
_MIRRORED = (
    tf.distribute.MirroredStrategy,
    tf.compat.v1.distribute.MirroredStrategy,
)
_TPU = (
    tf.distribute.TPUStrategy,
    tf.distribute.experimental.TPUStrategy,
)
_ONE_DEVICE = (
    tf.distribute.OneDeviceStrategy,
    tf.compat.v1.distribute.OneDeviceStrategy,
)
SUPPORTED = (
    "no strategy, OneDeviceStrategy, MirroredStrategy,"
    " MultiWorkerMirroredStrategy and TPUStrategy"
)


def kind_of(strategy: tf.distribute.Strategy) -> str:
    """`"single"`, `"mirrored"`, `"multi_worker"` or `"tpu"`.

    Args:
      strategy: A `tf.distribute.Strategy`, the default one included.

    Returns:
      The kind of strategy, which decides how a group sum travels.

    Raises:
      ValueError: For every other strategy. One that is not known might have one
        synchronous replica and still share variables between workers, as
        ParameterServerStrategy does, so nothing is assumed.
    """
    if isinstance(strategy, _MULTI_WORKER):
        return "multi_worker"
    if isinstance(strategy, _MIRRORED):
        return "mirrored"
    if isinstance(strategy, _TPU):
        return "tpu"
    if isinstance(strategy, _ONE_DEVICE) or is_default(strategy):
        return "single"
    raise ValueError(
        f"tf_xshard does not support {type(strategy).__name__}. Supported:"
        f" {SUPPORTED}. Create the model and its optimizer in the scope of one"
        " of these."
    )


def spans_processes(strategy: tf.distribute.Strategy) -> bool:
    """Whether replicas of a strategy are in several processes, each with some.

    So it is with MultiWorkerMirroredStrategy; of others nothing is assumed.
    """
    return (
        isinstance(strategy, _MULTI_WORKER)
        and len(strategy.extended.worker_devices)
        < strategy.num_replicas_in_sync
    )


def local_replica_ids(strategy: tf.distribute.Strategy) -> tuple[int, ...]:
    """The ids of the replicas that this process drives, in their order."""
    ids = strategy.experimental_local_results(
        strategy.experimental_distribute_values_from_function(
            lambda context: int(context.replica_id_in_sync_group)
        )
    )
    return tuple(int(one) for one in ids)


def process_id(strategy: tf.distribute.Strategy) -> int:
    """The number of this process among a strategy's; the chief's is 0."""
    ids = local_replica_ids(strategy)
    return ids[0] // len(ids)


def is_default(strategy: tf.distribute.Strategy) -> bool:
    """Whether this is the strategy of code outside any scope."""
    # The default strategy's class is not exported, the object itself is: it is
    # what get_strategy answers in a new thread of control, outside any scope.
    return strategy is _default_strategy()


@functools.cache
def _default_strategy() -> tf.distribute.Strategy:
    with tf.Graph().as_default():
        return tf.distribute.get_strategy()


@dataclasses.dataclass(frozen=True)
class Here:
    """Where the calling code runs, in the words of `tf.distribute`.

    Attributes:
      strategy: The current `tf.distribute.Strategy`.
      kind: See `kind_of`.
      num_replicas: `strategy.num_replicas_in_sync`.
      replica_id: `replica_id_in_sync_group`, or None where it is known at run
        time only (TPUStrategy traces one program for all replicas).
      device: The replica's device, a string; empty where it has no single one.
      num_local_replicas: How many of the replicas this process drives.
      graph: The graph of the replica function where replicas are traced one by
        one, else None. Code in `tf.cond` is traced in a graph inside it.
    """

    strategy: Any
    kind: str
    num_replicas: int
    replica_id: int | None
    device: str
    num_local_replicas: int
    graph: tf.Graph | None = None

    @property
    def num_processes(self) -> int:
        """How many processes the replicas are spread over."""
        return self.num_replicas // self.num_local_replicas

    @property
    def process_id(self) -> int:
        """Which of these processes this one is."""
        return (self.replica_id or 0) // self.num_local_replicas


def refuse_replica_context(what: str) -> None:
    """Checks that code runs outside of `strategy.run`.

    Args:
      what: What is called, for the error.

    Raises:
      RuntimeError: In replica context of a strategy.
    """
    if tf.distribute.has_strategy() and not (
        tf.distribute.in_cross_replica_context()
    ):
        raise RuntimeError(
            f"{what} is called in replica context. Call it outside of"
            " strategy.run()."
        )


def outermost_graph() -> tf.Graph | None:
    """The graph of the function that is being traced, of nested ones the outer.

    Returns:
      A graph, or None in eager code.
    """
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    # Only functions' graphs have one; the last is the surrounding program's.
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    return graph


def current() -> Here:
    """Where the calling code runs.

    Returns:
      A `Here`.

    Raises:
      RuntimeError: In cross-replica context, where there is no "this replica",
        and where replicas can't communicate: in a loop or a `tf.function`
        inside the replica function.
      ValueError: Under a strategy that is not supported.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError(
            "Gradients can't be applied in cross-replica context: there,"
            " TensorFlow can't tell one replica's gradients from another's."
            " Call apply() or apply_gradients() inside the function that you"
            " pass to strategy.run()."
        )
    strategy = context.strategy
    kind = kind_of(strategy)
    num_replicas = strategy.num_replicas_in_sync
    if kind == "single" or num_replicas == 1:
        return Here(strategy, kind, 1, 0, "", 1)
    if kind == "tpu":
        return Here(strategy, kind, num_replicas, None, "", num_replicas)
    replica_id = int(tf.get_static_value(context.replica_id_in_sync_group))
    devices = strategy.extended.worker_devices
    device = devices[replica_id % len(devices)]
    return Here(
        strategy,
        kind,
        num_replicas,
        replica_id,
        device,
        len(devices),
        _meeting_graph(),
    )


def device_names(here: Here) -> tuple[str, ...]:
    """A name for the device of every replica, equal in all processes.

    Collective group keys are derived from these, so two strategies over the
    same devices name the same group alike, and over other devices do not.
    """
    local = here.strategy.extended.worker_devices
    if here.num_processes == 1:
        return tuple(local)
    cluster = here.strategy.cluster_resolver.cluster_spec().as_dict()
    suffixes = [device.split("/")[-1] for device in local]
    return tuple(
        f"{sorted(cluster.items())}/{process}/{suffix}"
        for process in range(here.num_processes)
        for suffix in suffixes
    )


def has_device_assignment(strategy: tf.distribute.Strategy) -> bool:
    """Whether a TPUStrategy fixed XLA's replica numbering.

    Without it XLA's replica ids need not equal `replica_id_in_sync_group`.
    """
    # `_device_assignment` has been the attribute's name since TPUStrategy came
    # to TF 1.12; no public accessor answers this.
    return strategy.extended._device_assignment is not None


def in_xla() -> bool:
    """Whether XLA is going to compile what is being traced."""
    return _control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


def _meeting_graph() -> tf.Graph | None:
    """The graph of the replica function, None in eager mode.

    Raises:
      RuntimeError: Where replicas can't communicate.
    """
    if tf.executing_eagerly():
        return None
    thread = threading.current_thread()
    assert isinstance(thread, _mirrored_run._MirroredReplicaThread), thread
    graph = tf.compat.v1.get_default_graph()
    while graph is not thread.graph:
        if isinstance(graph, _func_graphs.WhileBodyFuncGraph):
            # A collective's key holds the name of the loop that it is in, and
            # each replica's loop has another one: they would wait forever.
            raise RuntimeError(
                "Gradients are applied in a loop (tf.while_loop, or `for` over"
                " tf.range) inside the replica function, where replicas can't"
                " meet. Put the loop around strategy.run() instead."
            )
        if not getattr(graph, "is_control_flow_graph", False):
            raise RuntimeError(
                "Gradients are applied in a tf.function that is called inside"
                " the replica function, where replicas can't meet. Decorate the"
                " function that calls strategy.run() with tf.function instead,"
                " and take the decorator off the inner one."
            )
        graph = graph.outer_graph
    return graph


def publish(key: str, value: str) -> None:
    """Puts a value into the cluster's key-value store."""
    _eager_context.context().set_config_key_value(key, value)


def lookup(key: str, timeout_seconds: float) -> str:
    """Waits for a value in the cluster's key-value store.

    Raises:
      tf.errors.OpError: If it does not come in time or a worker is gone.
    """
    return _eager_context.context().get_config_key_value(
        key, max(1, int(timeout_seconds * 1000))
    )


def withdraw(key: str) -> None:
    """Takes a value out of the cluster's key-value store."""
    _eager_context.context().delete_config_key_value(key)


def abort_collectives(message: str) -> None:
    """Makes every collective of this process fail, now and from now on."""
    _eager_context.context().abort_collective_ops(
        tf.errors.DEADLINE_EXCEEDED, message
    )


# Where a thread's innermost Python frame is while TensorFlow computes for it.
_COMPUTES = tuple(
    os.path.join(os.path.dirname(tf.__file__), "python", name, "")
    for name in ("client", "data", "eager", "framework", "ops")
)


def _is_another_thread_in(files: tuple[str, ...]) -> bool:
    return any(
        frame.f_code.co_filename.startswith(files)
        for thread, frame in sys._current_frames().items()
        if thread != threading.get_ident()
    )


def a_function_runs() -> bool:
    """Whether TensorFlow runs a function, and not only traces, for a thread."""
    return _is_another_thread_in((_eager_execute.__file__,))


def nothing_computes() -> bool:
    """Whether no thread waits for TensorFlow, so no collective is under way.

    The calling thread does not count.
    """
    return (
        tf.config.experimental.get_synchronous_execution()
        and not _is_another_thread_in(_COMPUTES)
    )


_caller = threading.local()


def entry_point(function: Callable) -> Callable:
    """Marks what a user's `tf.function` calls, so that AutoGraph skips it.

    AutoGraph would convert all code of this package that a step calls, which
    takes seconds of the first trace and changes nothing. What the user passes
    in is converted by itself: see `as_called_by_user`.

    Args:
      function: A function or method of this package.

    Returns:
      A function with the same signature.
    """
    unconverted = tf.autograph.experimental.do_not_convert(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        # An entry point inside another one is called by this package.
        if getattr(_caller, "convert", None) is not None:
            return unconverted(*args, **kwargs)
        _caller.convert = _as_it_is
        # Converted code calls through AutoGraph's module. Its context does not
        # tell: in the thread of a replica it says UNSPECIFIED in any case.
        if sys._getframe(1).f_code.co_filename == _autograph.__file__:
            _caller.convert = functools.partial(
                tf.__internal__.autograph.tf_convert,
                ctx=tf.__internal__.autograph.control_status_ctx(),
            )
        try:
            return unconverted(*args, **kwargs)
        finally:
            _caller.convert = None

    return _autograph.autograph_artifact(call)


def as_called_by_user(function: Callable) -> Callable:
    """A function of the user's, converted as the user's own calls are.

    Args:
      function: What the user passed in, such as `pre_reduce`.

    Returns:
      It, converted by AutoGraph if the code that called the entry point is.
    """
    convert = getattr(_caller, "convert", None)
    return convert(function) if convert else function


def _as_it_is(function: Callable) -> Callable:
    return function
