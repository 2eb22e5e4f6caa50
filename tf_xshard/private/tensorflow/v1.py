"""Uses the private names of TensorFlow that `tf_xshard.compat` needs."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.private import names

_Optimizer = tf.compat.v1.train.Optimizer

_OPTIMIZER = "tensorflow.compat.v1.train.Optimizer."
# Present in TensorFlow 2.20 to 2.22.
_V1 = names.PrivateNames(
    "tf_xshard.compat.v1",
    {
        # The number of shards of tf.compat.v1.tpu.shard. No public API has it.
        "tpu_context": "tensorflow.python.tpu.tpu_function.get_tpu_context",
        # Under a strategy, a v1 optimizer sums gradients over all replicas in
        # this method. Its argument `skip_gradients_aggregation` would skip more
        # than the sum; slots would no longer be distributed variables.
        "apply": _OPTIMIZER + "_distributed_apply",
        # tf.train.Checkpoint restores an optimizer's slots through this method.
        "restore_slot": _OPTIMIZER + "_create_or_restore_slot_variable",
        # Makes one object a part of another in a tf.train.Checkpoint.
        "track": _OPTIMIZER + "_track_trackable",
        # The name under which a Saver stores the slices of a partitioned
        # variable.
        "slice_info": "tensorflow.Variable._get_save_slice_info",
        # Its `variable_scopes_count` has the counts behind names such as
        # tf.layers' "dense_1". Each thread has its own counts.
        "scope_store": (
            "tensorflow.python.ops.variable_scope.get_variable_scope_store"
        ),
        # The collection of all summary writers. The public function
        # `tf.compat.v1.summary.initialize` opens only the default writer.
        "writers": (
            "tensorflow.python.ops.summary_ops_v2"
            "._SUMMARY_WRITER_INIT_COLLECTION_NAME"
        ),
        # The stack of tf.variable_creator_scope. Each thread has its own stack.
        "creators": "tensorflow.Graph._variable_creator_stack",
        # Says if code is in a branch or loop of control flow v1.
        "control_flow": "tensorflow.Graph._get_control_flow_context",
        # Makes a variable's initialization run before existing operations.
        "add_control_input": "tensorflow.Operation._add_control_input",
        # Makes an operation use a shard's copy of a variable that all shards
        # share.
        "update_input": "tensorflow.Operation._update_input",
    },
)
_V1.check()
# A v1 optimizer's state, in attributes that only instances have. Present in
# 2.20 to 2.22.
_STATE = names.attributes(
    "tf_xshard.compat.v1",
    *("_slots", "_non_slot_dict", "_deferred_slot_restorations"),
)
# What `variable.name` returns.
names.attributes("tf_xshard.compat.v1", "_handle_name")


def tpu_number_of_shards() -> int | None:
    """Returns the number of shards that tf.compat.v1.tpu builds, or None."""
    return _V1.tpu_context().number_of_shards


def kept_by(graph: tf.Graph, name: str, make: Callable[[], Any]) -> Any:
    """Returns an object that lives as long as a graph; makes it if needed."""
    # The object refers to the graph's variables. As the value in a
    # WeakKeyDictionary, it would keep its own key, so it is an attribute.
    if not hasattr(graph, name):
        setattr(graph, name, make())
    return getattr(graph, name)


def in_control_flow(graph: tf.Graph) -> bool:
    """Returns True if the current code is in a v1 branch or loop of `graph`."""
    return graph._get_control_flow_context() is not None


def run_before(operation: tf.Operation, other: tf.Operation) -> None:
    """Makes `operation` run before `other`, which already exists."""
    other._add_control_input(operation)


def show_name(variable: tf.Variable, name: str) -> None:
    """Sets what `variable.name` returns; its operations keep their names."""
    variable._handle_name = name


def replace_input(
    operation: tf.Operation, old: tf.Tensor, new: tf.Tensor
) -> None:
    """Makes an operation that has not run yet read another tensor."""
    for index, tensor in enumerate(operation.inputs):
        if tensor is old:
            operation._update_input(index, new)


@contextlib.contextmanager
def collections_by_plain_names(
    graph: tf.Graph, plain_name: Callable[[str], str]
) -> Iterator[None]:
    """Makes `graph.get_collection(name, scope)` filter by plain names."""

    def get_collection(name: str, scope: str | None = None) -> list[Any]:
        items = tf.Graph.get_collection(graph, name)
        if scope is None:
            return items
        return [
            one
            for one in items
            if hasattr(one, "name") and re.match(scope, plain_name(one.name))
        ]

    graph.get_collection = get_collection
    try:
        yield
    finally:
        del graph.get_collection


def thread_state(
    graph: tf.Graph,
) -> contextlib.AbstractContextManager[None]:
    """Copies this thread's state of a graph, for another thread to enter."""
    counts = dict(_V1.scope_store().variable_scopes_count)
    creators = list(graph._variable_creator_stack)

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with graph.as_default():
            store = _V1.scope_store()
            store.variable_scopes_count = dict(counts)
            graph._variable_creator_stack = list(creators)
            yield

    return entered()


class _Extended:
    """Replaces a strategy's `extended`, to treat gradients as summed."""

    def __init__(self, extended: tf.distribute.StrategyExtended) -> None:
        self._extended = extended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extended, name)

    def batch_reduce_to(
        self,
        reduce_op: Any,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """Returns the values, of any shapes, unchanged."""
        del reduce_op, options
        return [value for value, _ in value_destination_pairs]


class _Strategy:
    """Replaces a strategy; its `extended` is `_Extended`."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self.extended = _Extended(strategy.extended)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


def take_out_the_sum(optimizer: tf.compat.v1.train.Optimizer) -> None:
    """Makes a v1 optimizer apply each replica's gradients without summing.

    The optimizers that it wraps do the same. Slots and the step counter are not
    affected.
    """
    if "_distributed_apply" not in vars(optimizer):
        original = optimizer._distributed_apply

        def distributed_apply(
            distribution: tf.distribute.Strategy, *args: Any, **kwargs: Any
        ) -> Any:
            return original(_Strategy(distribution), *args, **kwargs)

        optimizer._distributed_apply = distributed_apply
    for value in vars(optimizer).values():
        if isinstance(value, _Optimizer):
            take_out_the_sum(value)


def optimizers_in(optimizer: Any) -> Iterator[Any]:
    """Yields an optimizer and all optimizers at any depth in its attributes."""
    yield optimizer
    if isinstance(optimizer, _Optimizer):
        for value in vars(optimizer).values():
            # A wrapper's attribute may be an adapter around an optimizer.
            value = getattr(value, "optimizer", value)
            if isinstance(value, _Optimizer):
                yield from optimizers_in(value)


def stateless_copy(
    optimizer: tf.compat.v1.train.Optimizer,
) -> tf.compat.v1.train.Optimizer:
    """Copies a v1 optimizer without its slots.

    The optimizers in its attributes are copied in the same way. A wrapper of
    this package copies the optimizers inside it itself.
    """
    result = object.__new__(type(optimizer))
    vars(result).update(vars(optimizer))
    for name in _STATE:
        setattr(result, name, {})
    vars(result).pop("_distributed_apply", None)
    for name, value in vars(optimizer).items():
        if isinstance(value, _Optimizer):
            setattr(result, name, stateless_copy(value))
    return result


def show_state_of(
    optimizer: tf.compat.v1.train.Optimizer, graph: tf.Graph
) -> None:
    """Gives an optimizer its variables of one graph, and takes the others.

    Each graph keeps its own variables, so that no graph lives as long as the
    optimizer. Variables that were made eagerly stay.
    """
    for one in filter(_is_v1, optimizers_in(optimizer)):
        tables = {None: one._non_slot_dict, **one._slots}
        for name, table in tables.items():
            for key in list(table):
                [owner] = [
                    part for part in key if isinstance(part, tf.Graph)
                ] or [graph]
                if owner is not graph:
                    kept = _states_in(owner).setdefault(one, {})
                    kept.setdefault(name, {})[key] = table.pop(key)
        for name, kept in _states_in(graph).pop(one, {}).items():
            if name is None:
                one._non_slot_dict.update(kept)
            else:
                one._slots.setdefault(name, {}).update(kept)


def _states_in(graph: tf.Graph) -> weakref.WeakKeyDictionary[Any, Any]:
    return kept_by(graph, "tf_xshard_slots", weakref.WeakKeyDictionary)


def _is_v1(optimizer: Any) -> bool:
    return isinstance(optimizer, _Optimizer)


def track(
    optimizer: tf.compat.v1.train.Optimizer, child: Any, name: str
) -> None:
    """Makes `tf.train.Checkpoint` find an object below a v1 optimizer."""
    optimizer._track_trackable(child, name)


def restore_slot(
    optimizer: tf.compat.v1.train.Optimizer, **kwargs: Any
) -> None:
    """Restores a v1 optimizer's slot from a `tf.train.Checkpoint`."""
    optimizer._create_or_restore_slot_variable(**kwargs)


class WrapperBase(tf.compat.v1.train.Optimizer):
    """Shows the slots of an inner optimizer as a v1 optimizer's slots."""

    def __dir__(self) -> list[str]:
        # Checkpoint saves the slots of every object that lists this method. A
        # variable can't be a slot of two optimizers, so only the inner
        # optimizer saves its slots.
        return [name for name in super().__dir__() if name != "get_slot_names"]

    def _restore_slot(self, **kwargs: Any) -> None:
        """Passes a slot of a checkpoint to the inner optimizer."""
        raise NotImplementedError

    def _create_or_restore_slot_variable(self, **kwargs: Any) -> None:
        # In checkpoints of the original optimizers, the wrapper has the slots,
        # and no other variables.
        self._restore_slot(**kwargs)


def saved_name(variable: tf.Variable) -> str:
    """Returns the name under which a `Saver` stores a variable."""
    whole = variable._get_save_slice_info()
    return whole.full_name if whole else variable.op.name


def summary_writer_initializers(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the operations that open a graph's writers of `tf.summary`."""
    return graph.get_collection(_V1.writers)
