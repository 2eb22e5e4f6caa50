"""Agrees on which replica has a gradient for which variable.

A variable may have a gradient on only some replicas of a group. The others must
still take part in the sum, or the collective hangs. The replicas therefore
first tell each other the kind of gradient that they hold (None, a dense tensor
or IndexedSlices) and its dtype. They do so while the step is traced, which
costs nothing at run time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import site as site_lib
from tf_xshard.private.tensorflow import runtime

NONE, DENSE, SPARSE = "none", "dense", "sparse"


class Entry(NamedTuple):
    """Describes the gradient that a replica has for one variable, or `NONE`.

    `dtype` is empty for `NONE`; `shape` and `name` are the variable's.
    """

    kind: str
    dtype: str
    shape: str
    name: str


Pattern = tuple[Entry, ...]  # one entry per variable
Patterns = tuple[Pattern, ...]  # one pattern per replica
# Maps variable names and this process's patterns to all replicas' patterns.
KnownPatterns = dict[tuple, Patterns]


class _Opaque:
    """Hides a Python value from merge_call, which maps over structures."""

    def __init__(self, value: Any) -> None:
        self.value = value


def own_pattern(gradients: Sequence, variables: Sequence) -> Pattern:
    """Returns the pattern of this replica's gradients."""
    pattern = []
    for gradient, variable in zip(gradients, variables, strict=True):
        kind, dtype = NONE, ""
        if gradient is not None:
            is_sparse = isinstance(gradient, tf.IndexedSlices)
            kind, dtype = SPARSE if is_sparse else DENSE, gradient.dtype.name
        name = getattr(variable, "path", variable.name)
        pattern.append(Entry(kind, dtype, str(tuple(variable.shape)), name))
    return tuple(pattern)


@dataclasses.dataclass(frozen=True)
class Presence:
    """Holds the kind and dtype of one variable's communicated gradients.

    `kind` is `NONE`, and `dtype` None, if no participant has a gradient.
    `in_group` is True if a replica of this replica's group has a gradient.
    """

    kind: str
    dtype: str | None
    in_group: bool


def agreed(
    gradients: Sequence,
    variables: Sequence,
    transport: transport_lib.Transport,
    known: KnownPatterns,
) -> list[Presence]:
    """Decides how a reduction's participants communicate each gradient.

    Gradients are communicated as dense tensors if any participant holds a dense
    tensor, or if the transport can't gather.
    """
    site, groups = transport.site, transport.groups
    patterns = agree(
        gradients,
        variables,
        site,
        transport.communication.timeout_seconds,
        known,
    )
    group = patterns
    if site.replica_id is not None:
        members = tuple(groups)[groups.group_of(site.replica_id)]
        group = tuple(patterns[r] for r in members)
    # If an operation spans all groups, all replicas must pass the same list of
    # tensors, even for variables without a gradient in their own group.
    participants = patterns if transport.spans_groups else group
    result = []
    for index in range(len(variables)):
        kinds = {pattern[index].kind for pattern in participants}
        dtypes = [p[index].dtype for p in participants if p[index].dtype]
        kind = DENSE
        if kinds == {NONE}:
            kind = NONE
        elif DENSE not in kinds and transport.gathers:
            kind = SPARSE
        result.append(
            Presence(
                kind,
                dtypes[0] if dtypes else None,
                any(pattern[index].kind != NONE for pattern in group),
            )
        )
    return result


def agree(
    gradients: Sequence,
    variables: Sequence,
    site: site_lib.Site,
    timeout_seconds: float,
    known: KnownPatterns,
) -> Patterns:
    """Returns every replica's pattern, in the order of replica ids.

    A pattern in `known` was exchanged in an earlier trace and is not exchanged
    again. One worker may retrace a step alone (a ragged batch), and the others
    would not answer. In eager mode, every call exchanges patterns.

    Raises RuntimeError if another process does not answer in time or has other
    shapes, and ValueError if replicas pass different numbers, dtypes or shapes.
    """
    own = own_pattern(gradients, variables)
    names = [entry.name for entry in own]
    shapes = [list(v.shape) for v in variables]
    if site.replica_id is None:
        # One program is traced for all replicas.
        return (own,) * site.num_replicas

    def of_all(local: Patterns) -> Patterns:
        if site.num_processes == 1 or recorder.is_recording():
            return local * site.num_processes
        key = tuple(names), local
        if eager or key not in known:
            known[key] = _exchange(local, names, shapes, site, timeout_seconds)
        return known[key]

    eager = tf.executing_eagerly()
    patterns = _merged(own, of_all, site)
    _check_consistent(patterns)
    # Other processes may have named the same variables differently.
    first = site.rank * site.num_local_replicas
    _check_names(patterns[first : first + site.num_local_replicas])
    return patterns


def local_patterns(
    gradients: Sequence, variables: Sequence, site: site_lib.Site
) -> Patterns:
    """Returns the patterns of this process's replicas only."""
    own = own_pattern(gradients, variables)
    if site.replica_id is None:
        return (own,)  # One program is traced for all replicas.
    return _merged(own, lambda local: local, site)


def _merged(
    own: Pattern, function: Callable[[Patterns], Patterns], site: site_lib.Site
) -> Patterns:
    """Calls a function once, with the patterns of this process's replicas."""

    def in_cross_replica_context(strategy: Any, pattern: Any) -> _Opaque:
        boxes = strategy.experimental_local_results(pattern)
        return _Opaque(function(tuple(box.value for box in boxes)))

    context = tf.distribute.get_replica_context()
    # merge_call raises while a branch of tf.cond is traced, since the branch's
    # tensors belong to another graph. This call passes no tensors, so it can
    # run in the surrounding graph.
    with site.graph.as_default() if site.graph else contextlib.nullcontext():
        merged = context.merge_call(in_cross_replica_context, (_Opaque(own),))
    return merged.value


def _check_consistent(patterns: Sequence[Pattern]) -> None:
    first = patterns[0]
    for replica_id, pattern in enumerate(patterns):
        if len(pattern) != len(first):
            raise ValueError(
                f"Replica {replica_id} passes {len(pattern)} values but"
                f" replica 0 passes {len(first)}. All replicas must pass the"
                " same variables, or the same structure, in one call. For a"
                " gradient that a replica does not have, pass None to the"
                " optimizer, or zeros to a legacy optimizer or"
                " LossScaleOptimizer of tf_keras, which drop None."
            )
    for entries in zip(*patterns, strict=True):
        dtypes = {entry.dtype for entry in entries if entry.dtype}
        if len(dtypes) > 1:
            raise ValueError(
                f"Replicas pass different types {sorted(dtypes)} for"
                f" {entries[0].name!r}. Cast them to one type."
            )
        shapes = list(dict.fromkeys(entry.shape for entry in entries))
        if len(shapes) > 1:
            raise ValueError(
                f"Replicas pass different shapes {shapes} for"
                f" {entries[0].name!r}; in the order of the replicas:"
                f" {[entry.shape for entry in entries]}. Pad them to one shape,"
                " or reduce something of one shape, such as a sum over the"
                " rows."
            )


def _check_names(patterns: Sequence[Pattern]) -> None:
    for entries in zip(*patterns, strict=True):
        names = list(dict.fromkeys(entry.name for entry in entries))
        if len(names) > 1:
            raise ValueError(
                f"Replicas pass different values together: {names}. All"
                " replicas must pass the same variables, or the same structure,"
                " in one call, in the same order."
            )


def _exchange(
    local: Patterns,
    names: Sequence[str],
    shapes: list,
    site: site_lib.Site,
    timeout_seconds: float,
) -> Patterns:
    """Sends this process's patterns to all processes, and receives theirs."""
    first_names = f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
    answers = runtime.rendezvous(
        # A scope for each number of variables pairs the processes' exchanges.
        f"tf_xshard/gradient_pattern/{len(names)}",
        json.dumps([shapes, local]),
        range(site.num_processes),
        timeout_seconds,
        lambda worker: RuntimeError(
            f"{worker} did not say within {timeout_seconds} seconds which of"
            f" these variables it has gradients for: {first_names}. It ended,"
            " hangs, or traces a different step than this worker. See its"
            " output; all workers must run the same steps."
        ),
    )
    patterns: list[Pattern] = []
    for rank, answer in enumerate(answers):
        their_shapes, theirs = json.loads(answer)
        if their_shapes != shapes:
            raise RuntimeError(
                f"Worker {rank} applies gradients of shapes {their_shapes}, but"
                f" this worker applies {shapes} ({', '.join(names[:5])}). All"
                " workers must call their optimizers in the same order."
            )
        patterns += [tuple(Entry(*one) for one in each) for each in theirs]
    return tuple(patterns)
