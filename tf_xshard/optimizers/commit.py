"""Lets a call write only after all that it depends on exists.

A step may not happen: its data may end, or one replica may fail. TensorFlow
still runs the operations that need nothing of what is missing. So all writes
of a call wait for one no-op, the gate:

all gradients of the call, on all replicas of this process   --+
reductions of the call's gradients, on this replica          --+--> gate
                                                                     |
variables, slots, counters, accumulators, residuals, ...         <---+

Reductions do not wait for the gate, so the first bucket leaves while the
backward pass runs. A list of control inputs instead of one no-op would multiply
the edges of the graph, by a factor of 100 for 158 variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import site as site_lib


def gate(values: Iterable) -> contextlib.AbstractContextManager:
    """Makes operations created in this context wait until all values exist.

    Values are tensors, IndexedSlices, operations or None.
    """
    flat = [
        one
        for one in tf.nest.flatten(list(values), expand_composites=True)
        if one is not None
    ]
    if tf.executing_eagerly() or not flat:
        return contextlib.nullcontext()
    graph = tf.compat.v1.get_default_graph()
    # TensorFlow drops a control input of tf.cond that is also a data input, but
    # branches do not wait for all data inputs.
    flat = [
        tf.identity(one)
        if tf.is_tensor(one) and getattr(one, "graph", graph) is not graph
        else one
        for one in flat
    ]
    return tf.control_dependencies([tf.group(*flat)])


class Count(NamedTuple):
    """A counter that must be equal on the replicas of a group.

    With `is_common`, it must be equal on all replicas.
    """

    name: str
    variable: Any
    is_common: bool = False


def begin(
    gradients: Sequence,
    counts: Sequence[Count],
    groups: Sequence[group_assignment_lib.GroupAssignment],
    site: site_lib.Site,
    name: str,
) -> tuple[site_lib.Site, tuple]:
    """Returns the site of a call's collectives, and what its writes wait for.

    Collectives raise tf.errors.InvalidArgumentError before they start if
    replicas of this process have different counts. `groups` are the groups that
    the call reduces over, and `name` is the optimizer's.
    """
    check = None
    if counts and _can_merge(site):
        own = tf.stack(
            [
                tf.cast(replica_variables.read(one.variable), tf.int64)
                for one in counts
            ]
        )
        check = _merged(
            own,
            lambda every: _refuse_different(every, counts, groups, site, name),
        )
    waits_for = (*arrivals(gradients, site), check)
    return dataclasses.replace(site, check=check), waits_for


def arrivals(values: Iterable, site: site_lib.Site) -> list[Any]:
    """Returns what exists once all replicas of this process have their values.

    In a branch of the replica function, only this replica's values count.
    """
    if site.kind == "tpu":
        return []  # A program starts with all of its arguments.
    with gate(values):
        own = tf.constant(0.0)
    if not _can_merge(site):
        return [own]
    return [_merged(own, lambda every: tf.group(*every))]


def _merged(own: tf.Tensor, function: Callable[[Sequence], Any]) -> Any:
    """Calls a function once, with the tensors of this process's replicas."""
    return tf.distribute.get_replica_context().merge_call(
        lambda strategy, one: function(
            strategy.experimental_local_results(one)
        ),
        args=(own,),
    )


def _can_merge(site: site_lib.Site) -> bool:
    """Returns True if merge_call can run here, and is needed."""
    if site.num_local_replicas == 1 or site.kind == "tpu":
        return False
    # merge_call can't run in a branch of the replica function.
    return site.graph in (None, tf.compat.v1.get_default_graph())


def _refuse_different(
    every: Sequence[tf.Tensor],
    counts: Sequence[Count],
    groups: Sequence[group_assignment_lib.GroupAssignment],
    site: site_lib.Site,
    name: str,
) -> tf.Operation | None:
    """Asserts that all replicas count together; returns a graph's assertion."""
    first = site.rank * site.num_local_replicas
    local = range(first, first + site.num_local_replicas)
    # Each replica counts as the first replica of its group in this process.
    of_group = [
        next(
            position
            for position, other in enumerate(local)
            if all(one.group_of(other) == one.group_of(r) for one in groups)
        )
        for r in local
    ]
    values = tf.stack(every)
    expected = tf.gather_nd(
        values,
        [
            [(0 if one.is_common else f, i) for i, one in enumerate(counts)]
            for f in of_group
        ],
    )
    # The kernel itself: tf.debugging.Assert adds a conditional, with two graphs
    # to trace.
    return tf.raw_ops.Assert(
        condition=tf.reduce_all(tf.equal(values, expected)),
        data=[
            f"{name}: replicas of this process have made different numbers of"
            " steps, so they would wait for each other or diverge. A file, an"
            " assignment or a step that failed on some replicas can cause this."
            " Nothing was changed. Restore a checkpoint, repair the replicas"
            ' with DivergenceSentinel(action="repair"), or call reset() of a'
            " TowerOptimizer or AGNOptimizer to start its round or period"
            " again. The counts of"
            f" {', '.join(one.name for one in counts)}, by replica:",
            values,
        ],
        summarize=100,
    )
