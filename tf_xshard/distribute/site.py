"""Finds the strategy, the replica and the process on which code runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator
from typing import Any, NewType

import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.private.tensorflow import tracing

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
    """Returns `"single"`, `"mirrored"`, `"multi_worker"` or `"tpu"`."""
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


def check_devices(strategy: tf.distribute.Strategy) -> None:
    """Raises ValueError for a MirroredStrategy on devices that do not exist.

    TensorFlow accepts such a strategy, whose collectives then wait forever.
    """
    if kind_of(strategy) != "mirrored":
        return
    existing = [_device(one.name) for one in tf.config.list_logical_devices()]
    wanted = [_device(name) for name in strategy.extended.worker_devices]
    if missing := sorted(set(wanted) - set(existing)):
        raise ValueError(
            f"The strategy has replicas on {missing}, but TensorFlow has only"
            f" {existing}, so they would wait for each other forever. Make"
            " logical CPUs at the start of the program: tf.config."
            "set_logical_device_configuration(tf.config.list_physical_devices("
            f"'CPU')[0], [tf.config.LogicalDeviceConfiguration()] *"
            f" {len(wanted)})."
        )


def has_split_gpus() -> bool:
    """Returns True if a visible GPU is divided into logical GPUs."""
    configurations = map(
        tf.config.get_logical_device_configuration,
        tf.config.get_visible_devices("GPU"),
    )
    return any(len(one or ()) > 1 for one in configurations)


def _device(name: str) -> str:
    spec = tf.DeviceSpec.from_string(name)
    return f"{spec.device_type}:{spec.device_index}"


def spans_processes(strategy: tf.distribute.Strategy) -> bool:
    """Returns True for a MultiWorkerMirroredStrategy of several processes."""
    return (
        isinstance(strategy, _MULTI_WORKER)
        and len(strategy.extended.worker_devices)
        < strategy.num_replicas_in_sync
    )


def local_replica_ids(strategy: tf.distribute.Strategy) -> tuple[int, ...]:
    """Returns the ids of the replicas that this process drives, in order."""
    ids = strategy.experimental_local_results(
        strategy.experimental_distribute_values_from_function(
            lambda context: int(context.replica_id_in_sync_group)
        )
    )
    return tuple(int(one) for one in ids)


def rank(strategy: tf.distribute.Strategy) -> int:
    """Returns the rank of this process; the chief's is 0."""
    ids = local_replica_ids(strategy)
    return ids[0] // len(ids)


def is_default(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if this is the strategy of code outside any scope."""
    # TensorFlow does not export the default strategy's class. But get_strategy
    # returns the default strategy outside any scope.
    return strategy is _default_strategy()


def scope_of(
    strategy: tf.distribute.Strategy,
) -> contextlib.AbstractContextManager:
    """Enters a strategy's scope, in cross-replica context if eager."""
    if not tf.distribute.has_strategy():
        return strategy.scope()
    if tf.distribute.in_cross_replica_context() or not tf.executing_eagerly():
        return contextlib.nullcontext()
    return _cross_replica(strategy)


@contextlib.contextmanager
def _cross_replica(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Enters cross-replica context from replica context."""
    # A graph holds the context, which tf.init_scope does not leave. In replica
    # context, a checkpoint restores a new variable on one replica only.
    with (
        tf.Graph().as_default(),
        strategy.scope(),
        tf.__internal__.eager_context.eager_mode(),
    ):
        yield


def other_scope(strategy: tf.distribute.Strategy) -> str:
    """Describes the scope in which something was created, for errors."""
    if is_default(strategy):
        return "outside any strategy's scope"
    return f"in the scope of another {type(strategy).__name__}"


@functools.cache
def _default_strategy() -> tf.distribute.Strategy:
    with tf.Graph().as_default():
        return tf.distribute.get_strategy()


@dataclasses.dataclass(frozen=True)
class Site:
    """Holds the strategy, replica and process on which the calling code runs.

    Attributes:
      strategy: The current `tf.distribute.Strategy`.
      kind: See `kind_of`.
      num_replicas: `strategy.num_replicas_in_sync`.
      replica_id: `replica_id_in_sync_group`, or None if it is only known at run
        time (TPUStrategy traces one program for all replicas).
      device: The replica's device; empty on one replica and on TPUs.
      num_local_replicas: The number of replicas that this process drives.
      graph: The graph of the replica function if replicas are traced one by
        one, else None. `tf.cond` traces in a graph inside it.
      check: An operation that collectives wait for, or None. It fails if
        replicas would wait for each other forever.
    """

    strategy: Any
    kind: str
    num_replicas: int
    replica_id: int | None
    device: str
    num_local_replicas: int
    graph: tf.Graph | None = None
    check: tf.Operation | None = None

    @property
    def num_processes(self) -> int:
        """The number of processes that drive the replicas."""
        return self.num_replicas // self.num_local_replicas

    @property
    def rank(self) -> int:
        """The rank of this process; the chief's is 0."""
        return (self.replica_id or 0) // self.num_local_replicas


def refuse_replica_context(what: str) -> None:
    """Raises RuntimeError if code runs inside `strategy.run`."""
    if tf.distribute.has_strategy() and not (
        tf.distribute.in_cross_replica_context()
    ):
        raise RuntimeError(
            f"{what} is called in replica context. Call it outside of"
            " strategy.run()."
        )


def outermost_graph() -> tf.Graph | None:
    """Returns the graph of the outermost function that is being traced."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    # Only a function's graph has an outer graph. The last outer graph belongs
    # to the surrounding program.
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    return graph


def function_graph() -> tf.Graph | None:
    """Returns the graph of the innermost function that is being traced.

    Branches and loops belong to the function around them.
    """
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    return graph


_refused = threading.local()


@contextlib.contextmanager
def refused(message: str | None) -> Iterator[None]:
    """Makes `current` raise RuntimeError with a message, unless it is None."""
    outer = getattr(_refused, "message", None)
    _refused.message = message
    try:
        yield
    finally:
        _refused.message = outer


def current() -> Site:
    """Returns the `Site` of the calling code."""
    if message := getattr(_refused, "message", None):
        raise RuntimeError(message)
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError(
            "Gradients can't be applied in cross-replica context, where"
            " TensorFlow can't distinguish one replica's gradients from"
            " another's. Call apply() or apply_gradients() inside the function"
            " that you pass to strategy.run()."
        )
    strategy = context.strategy
    kind = kind_of(strategy)
    num_replicas = strategy.num_replicas_in_sync
    if kind == "single" or num_replicas == 1:
        return Site(strategy, kind, 1, 0, "", 1)
    if kind == "tpu":
        return Site(strategy, kind, num_replicas, None, "", num_replicas)
    replica_id = int(tf.get_static_value(context.replica_id_in_sync_group))
    devices = strategy.extended.worker_devices
    device = devices[replica_id % len(devices)]
    return Site(
        strategy,
        kind,
        num_replicas,
        replica_id,
        device,
        len(devices),
        _replica_graph(),
    )


def device_names(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the full names of the devices of all replicas, by replica ids.

    The names are equal in all processes.
    """
    local = tuple(strategy.extended.worker_devices)
    if not spans_processes(strategy):
        return local
    cluster = strategy.cluster_resolver.cluster_spec()
    return tuple(
        tf.DeviceSpec.from_string(device)
        .replace(job=job, task=task)
        .to_string()
        # A cluster's evaluator has no replicas.
        for job in ("chief", "worker")
        if job in cluster.jobs
        for task in cluster.task_indices(job)
        for device in local
    )


# Groups whose replicas are in the order of their positions.
RankedGroups = NewType("RankedGroups", group_assignment_lib.GroupAssignment)


def ranked(
    groups: group_assignment_lib.GroupAssignment,
    strategy: tf.distribute.Strategy,
) -> RankedGroups:
    """Orders the replicas of each group by their positions.

    A replica's position in its group is TensorFlow's rank of its device. It is
    the replica's index in its group in the result. Whoever needs a position
    gets it from here: a collective's rows, a shard's place, an owner.
    """
    if kind_of(strategy) in ("mirrored", "multi_worker"):
        return _ranked(groups, device_names(strategy))
    # Sums are the only collectives of a TPU, so any order would be right.
    return _ranked(groups, None)


@functools.cache
def _ranked(
    groups: group_assignment_lib.GroupAssignment,
    devices: tuple[str, ...] | None,
) -> RankedGroups:
    ids = range(groups.num_replicas)
    keys = [_rank_key(one) for one in devices] if devices else ids
    return RankedGroups(
        group_assignment_lib.GroupAssignment(
            [sorted(group, key=keys.__getitem__) for group in groups]
        )
    )


def _rank_key(device: str) -> tuple:
    """Returns what TensorFlow sorts the devices of a collective's group by."""
    # CollectiveParamResolverLocal::CompleteDefaultRanking sorts tasks as
    # strings (task 10 before task 2), and the devices of a task by type and
    # number (CPU:2 before CPU:10). The order in which devices join the group,
    # or are passed to a strategy, does not matter. Three or more GPUs of a task
    # have this order only if each can access the memory of all others: from the
    # first one, TensorFlow follows links, which Python can't read.
    spec = tf.DeviceSpec.from_string(device)
    task = spec.replace(device_type=None, device_index=None).to_string()
    return task, spec.device_type, spec.device_index


def _replica_graph() -> tf.Graph | None:
    """Returns the graph of the replica function; None in eager mode."""
    if tf.executing_eagerly():
        return None
    replica_graph = tracing.replica_graph()
    graph = tf.compat.v1.get_default_graph()
    while graph is not replica_graph:
        if tracing.is_loop_body(graph):
            # A collective's key contains the name of its loop, which differs
            # between replicas. The replicas would wait forever.
            raise RuntimeError(
                "Replicas can't communicate inside a loop (tf.while_loop, or"
                " `for` over tf.range) in the replica function, where gradients"
                " are applied. Put the loop around strategy.run() instead."
            )
        if not getattr(graph, "is_control_flow_graph", False):
            raise RuntimeError(
                "Replicas can't communicate inside a tf.function that is"
                " called in the replica function, where gradients are applied."
                " Decorate the function that calls strategy.run() with"
                " tf.function instead, and remove the decorator from the inner"
                " function."
            )
        graph = graph.outer_graph
    return graph
