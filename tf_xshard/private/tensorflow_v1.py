"""Private names of TensorFlow that the TF1 surface needs.

The only module of `tf_xshard.compat` that touches them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import variable_scope as _variable_scope
from tensorflow.python.tpu import tpu_function as _tpu_function

from tf_xshard import dependencies

_Optimizer = tf.compat.v1.train.Optimizer

# Each with the reason. Seen in 2.20 and 2.21.
# conformance/private_names_test.py fails with the name of one that moved.
TF_PRIVATE_NAMES = (
    # How many shards tf.compat.v1.tpu.shard builds for; it tells nobody else.
    (_tpu_function, "get_tpu_context"),
    # Under a strategy a v1 optimizer sums gradients over all replicas in here.
    # Its argument `skip_gradients_aggregation` would skip more than the sum:
    # slots would not be distributed variables any more.
    (_Optimizer, "_distributed_apply"),
    # What tf.train.Checkpoint asks for an optimizer's slots.
    (_Optimizer, "_create_or_restore_slot_variable"),
    # The counts behind tf.layers' "dense_1", which each thread has of its own.
    (_variable_scope, "get_variable_scope_store"),
    # Python's view of `creators` that a tf.function has put around variables.
    (tf.Graph, "_variable_creator_stack"),
    # Whether code is in a branch or loop of control flow v1.
    (tf.Graph, "_get_control_flow_context"),
    # Lets what initializes a variable run before operations that exist already.
    (tf.Operation, "_add_control_input"),
)
# Attributes of instances, used the same way:
# `_slots`, `_non_slot_dict`, `_deferred_slot_restorations`
#                       a v1 optimizer's state
# `_track_trackable`    what makes one object part of another in a Checkpoint
dependencies.check_names(TF_PRIVATE_NAMES)


def tpu_number_of_shards() -> int | None:
    """For how many shards tf.compat.v1.tpu builds; None outside of it."""
    return _tpu_function.get_tpu_context().number_of_shards


def in_control_flow(graph: tf.Graph) -> bool:
    """Whether the current code is in a v1 branch or loop of `graph`."""
    return graph._get_control_flow_context() is not None


def run_before(operation: tf.Operation, other: tf.Operation) -> None:
    """Makes `operation` run before `other`, which exists already."""
    other._add_control_input(operation)


def thread_state(graph: tf.Graph):
    """Takes what another thread needs to build on in the same graph.

    Returns:
      A context manager for that thread.
    """
    counts = dict(
        _variable_scope.get_variable_scope_store().variable_scopes_count
    )
    creators = list(graph._variable_creator_stack)

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with graph.as_default():
            store = _variable_scope.get_variable_scope_store()
            store.variable_scopes_count = dict(counts)
            graph._variable_creator_stack = list(creators)
            yield

    return entered()


class _Extended:
    """A strategy's `extended` under which gradients are summed already."""

    def __init__(self, extended):
        self._extended = extended

    def __getattr__(self, name):
        return getattr(self._extended, name)

    def batch_reduce_to(self, reduce_op, value_destination_pairs, options=None):
        del reduce_op, options
        return [value for value, _ in value_destination_pairs]


class _Strategy:
    def __init__(self, strategy):
        self._strategy = strategy
        self.extended = _Extended(strategy.extended)

    def __getattr__(self, name):
        return getattr(self._strategy, name)


def take_out_the_sum(optimizer: _Optimizer) -> None:
    """Makes a v1 optimizer apply each replica's gradients as they are.

    Also those that it wraps. Slots and the step counter stay as they were.
    """
    if "_distributed_apply" not in vars(optimizer):
        original = optimizer._distributed_apply

        def distributed_apply(distribution, *args, **kwargs):
            return original(_Strategy(distribution), *args, **kwargs)

        optimizer._distributed_apply = distributed_apply
    for value in vars(optimizer).values():
        if isinstance(value, _Optimizer):
            take_out_the_sum(value)


def optimizers_in(optimizer) -> Iterator[Any]:
    """An optimizer, and all that it holds in its attributes."""
    yield optimizer
    if isinstance(optimizer, _Optimizer):
        for value in vars(optimizer).values():
            value = getattr(value, "optimizer", value)  # A wrapper's adapter.
            if isinstance(value, _Optimizer):
                yield from optimizers_in(value)


def stateless_copy(optimizer: _Optimizer) -> _Optimizer:
    """A v1 optimizer with the same arguments and no slots.

    The same holds for all that it holds; wrappers of this package look after
    their own.
    """
    result = object.__new__(type(optimizer))
    vars(result).update(vars(optimizer))
    for name in ("_slots", "_non_slot_dict", "_deferred_slot_restorations"):
        setattr(result, name, {})
    vars(result).pop("_distributed_apply", None)
    for name, value in vars(optimizer).items():
        if isinstance(value, _Optimizer):
            setattr(result, name, stateless_copy(value))
    return result
