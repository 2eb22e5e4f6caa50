"""Reduces each replica's gradients over its group.

gradients of replica r:   dense        IndexedSlices        None
                            |                |                |
  presence                  |                |      zeros, if another replica
                            |                |      of the group has one
  error feedback         + carry             |
  pack, wire, collective  [flat]        gather rows
  unpack                    |            sum of rows
  scale                     |                |
                          dense        IndexedSlices, each index once
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_xshard import collectives
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import reductions
from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import indexed_slices
from tf_xshard.distribute import ownership
from tf_xshard.distribute import replica_variables
from tf_xshard.distribute import shards as shards_lib
from tf_xshard.distribute import site as site_lib
from tf_xshard.reduction import buckets
from tf_xshard.reduction import error_feedback
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import owners as owners_lib
from tf_xshard.reduction import presence
from tf_xshard.reduction import wire


def sum_rows(
    slices: Sequence[tf.IndexedSlices], transport: transport_lib.Transport
) -> list[tf.IndexedSlices]:
    """Gathers a group's rows, and sums rows of the same index.

    The number of rows may differ by replica. The results' indices are unique.
    """
    if not slices:
        return []
    tensors = []
    for one in slices:
        # The receiving replica sums the rows in the gradient's own dtype.
        dtype = transport.communication.dtype_of_rows(one.dtype.name)
        tensors.append(tf.cast(one.values, dtype))
        tensors.append(tf.cast(one.indices, tf.int64))
    # Each variable has two tensors. Its rows count as a variable, and their
    # indices do not.
    with recorder.labelled(counts=[1, 0] * len(slices)):
        gathered = transport.gather(tensors)
    return [
        indexed_slices.unique(
            tf.IndexedSlices(
                tf.cast(values, one.dtype),
                tf.cast(indices, one.indices.dtype),
                one.dense_shape,
            )
        )
        for one, values, indices in zip(
            slices, gathered[::2], gathered[1::2], strict=True
        )
    ]


def without_rows(variable: tf.Variable, dtype: str | None) -> tf.IndexedSlices:
    """Returns IndexedSlices of a variable without any row."""
    return tf.IndexedSlices(
        tf.zeros([0, *variable.shape[1:]], dtype),
        tf.zeros([0], tf.int64),
        tf.constant(variable.shape.as_list(), tf.int64),
    )


def part_of_rows(
    rows: tf.IndexedSlices,
    variable: Any,
    owner: int | None,
    groups: site_lib.RankedGroups,
    position: Any,
) -> tf.Tensor:
    """Returns this replica's dense part of a gradient of some rows."""
    if owner is None:
        layout = shards_lib.Layout(tuple(variable.shape), groups)
        return layout.shard_of_rows(rows, position)
    return ownership.only_for_owner(
        indexed_slices.dense(rows, variable), owner, position
    )


def _gathered(
    gather: Callable[..., list[tf.Tensor]],
    values: Sequence[tf.Tensor],
    places: Sequence,
    transport: transport_lib.Transport,
    wanted: Sequence[bool],
) -> list:
    """Gathers the wanted values from their places; None for the others."""
    # Groups that share an operation may want different tensors.
    indices = [
        i for i, want in enumerate(wanted) if want or transport.spans_groups
    ]
    wholes = gather(
        [values[i] for i in indices], [places[i] for i in indices], transport
    )
    found = dict(zip(indices, wholes, strict=True))
    return [found[i] if want else None for i, want in enumerate(wanted)]


Carry = error_feedback.Carry


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Holds a batch, split by how its gradients are communicated.

    `dense` has tensors, and `sparse` has IndexedSlices, by the positions of
    their variables. Results are in the order of `dense`, then of `sparse`.
    """

    batch: gradients_lib.GradientBatch
    presences: list[presence.Presence]
    dense: dict[int, tf.Tensor]
    sparse: dict[int, tf.IndexedSlices]

    def joined(self, results: Sequence) -> gradients_lib.GradientBatch:
        """Returns the batch of results; None if the group has no gradient."""
        found = dict(zip([*self.dense, *self.sparse], results, strict=True))
        return self.batch.with_values(
            found.get(i) if one.in_group else None
            for i, one in enumerate(self.presences)
        )

    def left(self, lost: Sequence[tf.Tensor] | None) -> Carry:
        """Makes a carry of the errors of communicating `dense`."""
        return error_feedback.left(
            [self.batch.variables[i] for i in self.dense], lost
        )


class GradientReducer:
    """Reduces gradients with the settings of one `Communication`.

    A reducer remembers which gradients the replicas had in a trace, so that a
    retrace does not ask the other processes again.
    """

    def __init__(
        self,
        communication: communication_lib.Communication,
        known_patterns: presence.KnownPatterns | None = None,
    ) -> None:
        self.communication = communication
        self._number = transport_lib.number_for(self)
        self._known_patterns: presence.KnownPatterns = (
            {} if known_patterns is None else known_patterns
        )

    def all_reduce(
        self,
        batch: gradients_lib.GradientBatch,
        site: site_lib.Site,
        groups: group_assignment_lib.GroupAssignment,
        reduction: reductions.Reduction,
        carry: Carry = None,
        *,
        exact: bool = False,
    ) -> tuple[gradients_lib.GradientBatch, Carry]:
        """Reduces gradients over this replica's group."""
        batch, carry = self.sum(batch, site, groups, carry, exact=exact)
        return batch.multiplied(reduction.of_sum(groups.group_size)), carry

    def sum(
        self,
        batch: gradients_lib.GradientBatch,
        site: site_lib.Site,
        groups: group_assignment_lib.GroupAssignment,
        carry: Carry = None,
        *,
        exact: bool = False,
    ) -> tuple[gradients_lib.GradientBatch, Carry]:
        """Sums gradients over the group, without the batch's factor."""
        if groups.group_size == 1 or not batch.variables:
            return batch, None  # Nothing is communicated, so nothing is lost.
        transport = self.transport(site, groups, exact=exact)
        parts = self._parts(batch, transport, carry)
        sums, lost = buckets.sum_dense([*parts.dense.values()], transport)
        rows = sum_rows([*parts.sparse.values()], transport)
        return parts.joined([*sums, *rows]), parts.left(lost)

    def reduce_scatter(
        self,
        batch: gradients_lib.GradientBatch,
        site: site_lib.Site,
        groups: group_assignment_lib.GroupAssignment,
        reduction: reductions.Reduction,
        carry: Carry = None,
        *,
        owner_of: Mapping[int, int],
    ) -> tuple[gradients_lib.GradientBatch, Carry]:
        """Returns this replica's dense part of the result of `all_reduce`.

        Groups must have several replicas. `owner_of` gives the positions of the
        owners of some variables, by key. Their gradients are whole on the
        owner, and zeros elsewhere. Gradients of other variables are shards.
        """
        transport = self.transport(site, groups)
        parts = self._parts(batch, transport, carry)
        owners = [
            owner_of.get(replica_variables.key(v)) for v in batch.variables
        ]
        shards, lost = self._scattered(parts, owners, transport)
        position = transport.position()
        of_rows = [
            part_of_rows(
                rows, batch.variables[i], owners[i], transport.groups, position
            )
            for i, rows in zip(
                parts.sparse,
                sum_rows([*parts.sparse.values()], transport),
                strict=True,
            )
        ]
        reduced = parts.joined([*shards, *of_rows])
        divisor = reduction.of_sum(groups.group_size)
        return reduced.multiplied(divisor), parts.left(lost)

    def _scattered(
        self,
        parts: _Parts,
        owners: Sequence[Any],
        transport: transport_lib.Transport,
    ) -> wire.Reduced:
        """Scatters dense gradients by shards, or packed by owners."""
        owned = [i for i in parts.dense if owners[i] is not None]
        split = [i for i in parts.dense if owners[i] is None]
        of_split = buckets.scatter_dense(
            [parts.dense[i] for i in split], transport
        )
        of_owned = owners_lib.sum_to_owners(
            [parts.dense[i] for i in owned],
            [owners[i] for i in owned],
            transport,
        )
        order = np.argsort([*split, *owned])
        values = of_split.values + of_owned.values
        lost = (of_split.lost or []) + (of_owned.lost or [])
        return wire.Reduced(
            [values[n] for n in order],
            [lost[n] for n in order] if lost else None,
        )

    def all_gather(
        self,
        shards: Sequence[tf.Tensor],
        layouts: Sequence[shards_lib.Layout],
        site: site_lib.Site,
        groups: group_assignment_lib.GroupAssignment,
        wanted: Sequence[bool],
    ) -> list:
        """Joins the shards of a group's replicas."""
        transport = self.transport(site, groups, exact=True)
        return _gathered(
            buckets.gather_dense, shards, layouts, transport, wanted
        )

    def gather_from_owners(
        self,
        tensors: Sequence[tf.Tensor],
        owners: Sequence[int],
        site: site_lib.Site,
        groups: group_assignment_lib.GroupAssignment,
        wanted: Sequence[bool],
    ) -> list:
        """Returns the values that the owners in a group have."""
        transport = self.transport(site, groups, exact=True)
        return _gathered(
            owners_lib.gather_from_owners, tensors, owners, transport, wanted
        )

    def channel(
        self, groups: group_assignment_lib.GroupAssignment
    ) -> transport_lib.Channel:
        """Returns this reducer's channel for some groups."""
        return transport_lib.Channel(groups, self.communication, self._number)

    def transport(
        self,
        site: site_lib.Site,
        groups: group_assignment_lib.GroupAssignment,
        *,
        exact: bool = False,
    ) -> transport_lib.Transport:
        """Returns the transport of this replica's group."""
        channel = self.channel(groups)
        return collectives.transport_for(
            site, channel.exact() if exact else channel
        )

    def _parts(
        self,
        batch: gradients_lib.GradientBatch,
        transport: transport_lib.Transport,
        carry: Carry,
    ) -> _Parts:
        """Splits a batch; adds zeros for gradients that only others hold."""
        presences = presence.agreed(
            batch.values, batch.variables, transport, self._known_patterns
        )
        dense, sparse = {}, {}
        for position, (found, (value, variable)) in enumerate(
            zip(presences, batch.pairs(), strict=True)
        ):
            if found.kind == presence.DENSE:
                if value is None:
                    value = tf.zeros(variable.shape, found.dtype)
                elif isinstance(value, tf.IndexedSlices):
                    value = indexed_slices.dense(value, variable)
                if transport.communication.error_feedback:
                    value = error_feedback.added(value, variable, carry)
                dense[position] = value
            elif found.kind == presence.SPARSE:
                if value is None:
                    value = without_rows(variable, found.dtype)
                sparse[position] = value
        return _Parts(batch, presences, dense, sparse)


class ReducerOfEachFunction:
    """Holds a reducer for each outermost function that is being traced.

    Several threads may train at the same time with what does not belong to an
    optimizer, such as one loss. Their collectives need separate channels. The
    functions share what the reducers remember, since one worker may retrace
    alone.
    """

    def __init__(self, communication: communication_lib.Communication) -> None:
        self.communication = communication
        self._known_patterns: presence.KnownPatterns = {}
        # Eager collectives do not use the reducer's number.
        self._eager = self._new()
        self._of_graphs: weakref.WeakKeyDictionary[
            tf.Graph, GradientReducer
        ] = weakref.WeakKeyDictionary()

    def current(self) -> GradientReducer:
        """Returns the reducer of the function that is being traced."""
        graph = site_lib.outermost_graph()
        if graph is None:
            return self._eager
        with _lock:
            if graph not in self._of_graphs:
                self._of_graphs[graph] = self._new()
            return self._of_graphs[graph]

    def _new(self) -> GradientReducer:
        return GradientReducer(self.communication, self._known_patterns)


_lock = threading.Lock()
