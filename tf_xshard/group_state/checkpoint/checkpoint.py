"""Saves every variable of every replica to a directory, and restores them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import replica_variables
from tf_xshard.group_state import inventory
from tf_xshard.group_state import merge
from tf_xshard.group_state import replica_io
from tf_xshard.group_state.checkpoint import files
from tf_xshard.optimizers import saving
from tf_xshard.optimizers import stack
from tf_xshard.private.keras import shards as keras_shards


def matched(
    variables: Sequence[inventory.StateVariable],
    saved: list[dict[str, Any]],
    directory: str,
) -> list[tuple[inventory.StateVariable, int, dict]]:
    """Pairs variables with the indices and entries of a save."""
    saved_names = {(one["part"], one["name"]) for one in saved}
    own = [
        one
        for one in variables
        if one.kind != "metric"
        and ((one.part, one.name) in saved_names or not one.may_be_missing)
    ]
    here = {(one.part, one.name) for one in variables}
    its = [
        (index, one)
        for index, one in enumerate(saved)
        if one["kind"] != "metric"
        and (
            (one["part"], one["name"]) in here
            or not (one["of_optimizer"] and saving.is_optional(one["name"]))
        )
    ]
    # The same names in another order mean reordered layers. Check this first,
    # since the comparison below ignores Keras's numbers in the names.
    mine, theirs = (
        [_last(n) for n in names]
        for names in (
            [one.name for one in own if not one.of_optimizer],
            [other["name"] for _, other in its if not other["of_optimizer"]],
        )
    )
    if mine != theirs and sorted(mine) == sorted(theirs):
        first = next(a for a, b in zip(mine, theirs, strict=True) if a != b)
        raise ValueError(
            f"{directory!r} was saved from a model whose variables are in"
            f" another order; the first that differs is {first!r}. Build the"
            " layers in the order in which they were saved."
        )
    for one, (_, other) in zip(own, its, strict=False):
        site = (
            *(one.part, one.shape),
            _own_name(one.name, one.of_optimizer),
        )
        there = (
            other["part"],
            tuple(other["shape"]),
            _own_name(other["name"], other["of_optimizer"]),
        )
        if site != there or not (
            replica_variables.takes(one.dtype, other["dtype"])
        ):
            raise ValueError(
                f"{directory!r} was saved from another model or optimizer:"
                f" instead of {one.name!r} of {one.part!r},"
                f" {one.dtype} {list(one.shape)}, it has {other['name']!r} of"
                f" {other['part']!r}, {other['dtype']} {other['shape']}."
                " Nothing was restored."
            )
    if len(own) != len(its):
        longer = (
            [one.name for one in own]
            if len(own) > len(its)
            else [other["name"] for _, other in its]
        )
        raise ValueError(
            f"{directory!r} was saved from another model or optimizer: it has"
            f" {len(its)} variables, but this GroupState has {len(own)}. The"
            " first missing variable is"
            f" {longer[min(len(own), len(its))]!r}. Nothing was restored."
        )
    return [
        (one, index, other)
        for one, (index, other) in zip(own, its, strict=True)
    ] + _matched_metrics(variables, saved)


def _matched_metrics(
    variables: Sequence[inventory.StateVariable],
    saved: list[dict[str, Any]],
) -> list[tuple[inventory.StateVariable, int, dict]]:
    # Keras creates and resets metrics when training begins. Several metrics
    # share a name, so either all match or none is restored.
    own = [one for one in variables if one.kind == "metric"]
    its = [
        (index, other)
        for index, other in enumerate(saved)
        if other["kind"] == "metric"
    ]
    if [(one.part, one.name, one.shape) for one in own] != [
        (other["part"], other["name"], tuple(other["shape"]))
        for _, other in its
    ]:
        return []
    return [(one, *other) for one, other in zip(own, its, strict=True)]


def _last(path: str) -> str:
    """Returns the last two names of a path, a layer's and a variable's."""
    # The path contains the model's name or not, depending on how the model was
    # created.
    return "/".join(path.split("/")[-2:])


def _own_name(path: str, of_optimizer: bool) -> str:
    """Returns the part of a variable's path that is the same in every run."""
    # Keras numbers equal names, as in `sequential_1/dense_2/kernel`. The name
    # of an optimizer's variable starts with such a path, but its last word is
    # stable.
    own = re.sub(r"_\d+", "", _last(path))
    return re.split("[/_]", own)[-1] if of_optimizer else own


class Position(NamedTuple):
    """Describes the progress of training when a state was saved.

    Attributes:
      epoch: The number of completed epochs.
      step: The number of completed steps of the next epoch.
    """

    epoch: int
    step: int


def save(
    catalog: inventory.Catalog,
    replicas: replica_io.ReplicaValues,
    directory: str,
    epoch: int,
    step: int,
    shared: bool,
) -> None:
    """See `GroupState.save`. Collective."""
    with locked_by_first(replicas, directory) as is_locked:
        _save(catalog, replicas, directory, epoch, step, shared, is_locked)


@contextlib.contextmanager
def locked_by_first(
    replicas: replica_io.ReplicaValues, directory: str
) -> Iterator[bool]:
    """Holds `files.locked` on the process that commits. Collective."""
    with contextlib.ExitStack() as stack:
        is_locked = replicas.run_on_all_processes(
            f"Locking {directory!r}",
            lambda: (
                replicas.rank == 0
                and stack.enter_context(files.locked(directory))
            ),
        )
        yield is_locked


def _save(
    catalog: inventory.Catalog,
    replicas: replica_io.ReplicaValues,
    directory: str,
    epoch: int,
    step: int,
    shared: bool,
    is_locked: bool,
) -> None:
    variables = catalog.variables()
    digests = replicas.digests([one.variable for one in variables])
    # The first replica that holds a value saves it for all.
    owners = [[row.index(digest) for digest in row] for row in digests]
    [token, *_] = replicas.gather_json(files.new_token())
    what = f"Saving to {directory!r}"
    values = _own_values(replicas, variables, owners)
    written = replicas.run_on_all_processes(
        what,
        lambda: files.write_values(
            directory,
            token,
            replicas.rank,
            values,
        ),
    )
    all_files = {
        name: checksum
        for of_process in replicas.gather_json(written)
        for name, checksum in of_process.items()
    }
    manifest = {
        "group_assignment": catalog.groups.to_list(),
        "epoch": epoch,
        "step": step,
        "optimizers": catalog.optimizer_classes(),
        "files": all_files,
        "variables": [
            {
                "part": one.part,
                "name": one.name,
                "kind": one.kind,
                "of_optimizer": one.of_optimizer,
                "dtype": one.dtype,
                "shape": one.shape,
                "owners": row,
            }
            for one, row in zip(variables, owners, strict=True)
        ],
    }

    def commit() -> None:
        if replicas.rank == 0:
            here = all_files if shared else written
            files.commit(directory, token, manifest, here, is_locked)

    replicas.run_on_all_processes(what, commit)
    if replicas.rank and not shared:
        files.remove_older(directory, replicas.rank, written)


def _own_values(
    replicas: replica_io.ReplicaValues,
    variables: Sequence[inventory.StateVariable],
    owners: Sequence[Sequence[int]],
) -> dict[str, np.ndarray]:
    """Reads the values that this process saves, by name. Collective."""
    values = {}
    ids = replicas.local_ids
    for index, one in enumerate(variables):
        is_sharded = isinstance(one.variable, keras_shards.Sharded)
        # All processes must take part in gathering a sharded variable.
        if not is_sharded and not set(owners[index]) & set(ids):
            continue
        local = replicas.local(one.variable)
        for r, value in zip(ids, local, strict=True):
            if r in owners[index]:
                values[_key(index, r)] = value
    return values


def _key(index: int, replica_id: int) -> str:
    return f"{index}/replica_{replica_id}"


def position(directory: str) -> Position:
    """See `GroupState.position`."""
    manifest = files.read_manifest(directory)
    return Position(manifest["epoch"], manifest["step"])


def saved_groups(directory: str) -> group_assignment_lib.GroupAssignment:
    """Reads the groups of a save."""
    manifest = files.read_manifest(directory)
    return group_assignment_lib.GroupAssignment(manifest["group_assignment"])


def create_saved_state(
    catalog: inventory.Catalog,
    replicas: replica_io.ReplicaValues,
    directory: str,
) -> None:
    """Creates saved variables that exist only after a step. Collective."""
    manifest = replicas.run_on_all_processes(
        f"Restoring from {directory!r}", lambda: files.read_manifest(directory)
    )
    for part, found in catalog.optimizers.items():
        names = [
            one["name"] for one in manifest["variables"] if one["part"] == part
        ]
        for one in found:
            if stack.is_wrapper(one) and one.built:
                prefix = f"{one.name}/"
                one._create_named(
                    {
                        name.removeprefix(prefix)
                        for name in names
                        if name.startswith(prefix)
                    }
                )


def restore(
    catalog: inventory.Catalog,
    replicas: replica_io.ReplicaValues,
    directory: str,
    regroup: str | Mapping[int, int] | None,
) -> Position:
    """See `GroupState.restore`. Collective."""
    found, assignments = replicas.run_on_all_processes(
        f"Restoring from {directory!r}",
        lambda: _read(catalog, replicas.local_ids, directory, regroup),
    )
    for variable, values in assignments:
        replicas.assign(variable, values)
    return found


def restore_metrics(
    catalog: inventory.Catalog,
    replicas: replica_io.ReplicaValues,
    directory: str,
) -> None:
    """Restores metrics that were created after `restore`. Collective."""
    manifest = files.read_manifest(directory)
    pairs = _matched_metrics(catalog.variables(), manifest["variables"])
    keys = [
        [_key(index, saved["owners"][r]) for r in replicas.local_ids]
        for _, index, saved in pairs
    ]
    values = files.read_values(
        directory, manifest, sorted({key for row in keys for key in row})
    )
    for (one, *_), row in zip(pairs, keys, strict=True):
        replicas.assign(one.variable, [values[key] for key in row])


def _read(
    catalog: inventory.Catalog,
    local_ids: Sequence[int],
    directory: str,
    regroup: str | Mapping[int, int] | None,
) -> tuple[Position, list]:
    """Checks a save completely, and reads the values to assign."""
    manifest = files.read_manifest(directory)
    groups = group_assignment_lib.GroupAssignment(manifest["group_assignment"])
    sources = _sources(catalog.groups, directory, groups, regroup)
    own, its = catalog.optimizer_classes(), manifest["optimizers"]
    if own != its:
        raise ValueError(
            f"{directory!r} was saved from other optimizers: it has {its}, but"
            f" this model has {own} (in nested models and attributes, only"
            " built optimizers count). Nothing was restored. Compile the model"
            " with the same optimizers, nested in the same way."
        )
    pairs = matched(catalog.variables(), manifest["variables"], directory)
    if sources is not None:
        pairs = [pair for pair in pairs if pair[0].kind != "metric"]
    names = {
        _key(index, saved["owners"][r])
        for _, index, saved in pairs
        for r in (local_ids if sources is None else range(groups.num_replicas))
    }
    values = files.read_values(directory, manifest, sorted(names))
    assignments = []
    for one, index, saved in pairs:

        def of_replica(
            r: int, index: int = index, saved: dict = saved
        ) -> np.ndarray:
            return values[_key(index, saved["owners"][r])]

        if sources is None:
            found = [of_replica(r) for r in local_ids]
        else:
            of_group = merge.by_group(
                [of_replica(r) for r in range(groups.num_replicas)], groups
            )
            found = [
                merge.combined(
                    [of_group[g] for g in sources[catalog.groups.group_of(r)]]
                )
                for r in local_ids
            ]
        replica_io.refuse_several_values(one.variable, found)
        assignments.append((one.variable, found))
    restored = {one.key for one, *_ in pairs}
    for one in catalog.variables():
        if one.may_be_missing and one.key not in restored:
            zero = np.zeros(one.shape, one.numpy_type)
            assignments.append((one.variable, [zero] * len(local_ids)))
    return Position(manifest["epoch"], manifest["step"]), assignments


def _sources(
    groups: group_assignment_lib.GroupAssignment,
    directory: str,
    saved_groups: group_assignment_lib.GroupAssignment,
    regroup: str | Mapping[int, int] | None,
) -> list[list[int]] | None:
    """Returns the saved groups that each group takes, None for equal groups."""
    if regroup is None:
        if group_assignment_lib.same_groups(groups, saved_groups):
            return None
        raise ValueError(
            f"{directory!r} was saved with the groups"
            f" {saved_groups.to_list()} of {saved_groups.num_replicas}"
            f" replicas, but this GroupState has {groups.to_list()} of"
            f' {groups.num_replicas}. Pass regroup="mean", "first" or a dict'
            " {group: saved group} to restore it to other groups."
        )
    every = range(saved_groups.num_groups)
    if regroup == "mean":
        return [list(every)] * groups.num_groups
    if regroup == "first":
        return [[0]] * groups.num_groups
    if (
        not isinstance(regroup, Mapping)
        or set(regroup) != set(range(groups.num_groups))
        or not set(regroup.values()) <= set(every)
    ):
        raise ValueError(
            'regroup must be "mean", "first", or a dict that maps each group'
            f" from 0 to {groups.num_groups - 1} to a saved group from 0 to"
            f" {saved_groups.num_groups - 1}, got {regroup!r}."
        )
    return [[regroup[group]] for group in range(groups.num_groups)]
