"""Communicates whole tensors to and from their owners in a group.

Packs give each replica a row of its own tensors (`distribute.ownership`). A
program that runs on all replicas, as on TPUs, does not know while it is traced
which replica it runs on. It all-reduces tensors without packing them: there, a
reduce-scatter and an all-gather are all-reduces too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import ownership
from tf_xshard.distribute import shards
from tf_xshard.reduction import buckets
from tf_xshard.reduction import wire


def sum_to_owners(
    tensors: Sequence[tf.Tensor],
    owners: Sequence[int],
    transport: transport_lib.Transport,
) -> wire.Reduced:
    """Returns group sums on the owners, and zeros elsewhere."""
    if not tensors:
        return wire.Reduced([], None)
    position = transport.position()
    if tf.is_tensor(position):
        sums, lost = buckets.sum_dense(tensors, transport)
        return wire.Reduced(
            [
                ownership.only_for_owner(value, owner, position)
                for value, owner in zip(sums, owners, strict=True)
            ],
            lost,
        )
    packs = _packs(tensors, owners, transport)
    rows, lost_of_packs = buckets.scatter_dense(
        [pack.packed(tensors) for pack in packs],
        transport,
        [len(pack.members) for pack in packs],
    )
    zeros = {
        one.dtype: ownership.zero_after(rows, one.dtype) for one in tensors
    }
    result: list[Any] = [zeros[one.dtype] for one in tensors]
    for pack, row in zip(packs, rows, strict=True):
        for index, value in pack.unpacked_row(row, position).items():
            result[index] = value
    return wire.Reduced(
        result, lost_of_packs and _unpacked(packs, lost_of_packs)
    )


def gather_from_owners(
    tensors: Sequence[tf.Tensor],
    owners: Sequence[int],
    transport: transport_lib.Transport,
) -> list[tf.Tensor]:
    """Returns the owners' values of tensors.

    `transport` must communicate values unchanged.
    """
    for one in tensors:
        transport.check_dtype(one.dtype)
    position = transport.position()
    if tf.is_tensor(position):
        with recorder.labelled("variables"):
            return buckets.sum_dense(
                [
                    ownership.only_for_owner(value, owner, position)
                    for value, owner in zip(tensors, owners, strict=True)
                ],
                transport,
            ).values
    packs = _packs(tensors, owners, transport)
    flat = buckets.gather_dense(
        [pack.row(tensors, position) for pack in packs],
        [
            shards.Layout((len(p.rows) * p.row_size,), transport.groups)
            for p in packs
        ],
        transport,
        [len(pack.members) for pack in packs],
    )
    return _unpacked(packs, flat)


def _packs(
    tensors: Sequence[tf.Tensor],
    owners: Sequence[int],
    transport: transport_lib.Transport,
) -> list[ownership.Pack]:
    """Packs tensors of owners for collectives of the size of buckets."""
    if not tensors:
        return []
    group_size = transport.groups.group_size
    bytes_per_row = transport.communication.bytes_per_bucket / group_size
    return ownership.packs(
        owners,
        [tuple(one.shape) for one in tensors],
        [one.dtype.name for one in tensors],
        group_size,
        bytes_per_row / max(one.dtype.size for one in tensors),
    )


def _unpacked(
    packs: Sequence[ownership.Pack], flat: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns all tensors of some packs, in order."""
    found = {}
    for pack, rows in zip(packs, flat, strict=True):
        found.update(pack.unpacked(rows))
    return [found[index] for index in sorted(found)]
