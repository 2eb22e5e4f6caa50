"""Reads and writes sharded slot variables as whole values, outside a step.

Files, checkpoints and `GroupState` hold whole values. Several workers must read
(save) together, since shards are gathered. Each writes (loads) its own shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard.collectives import process_gather
from tf_xshard.distribute import replica_variables
from tf_xshard.private.keras import shards as keras_shards

_WHAT = "Reading (saving) the state of an optimizer with shard_update=True"


class WholeSlots:
    """Reads and writes one optimizer's sharded variables."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        communication: communication_lib.Communication,
    ) -> None:
        self._processes = process_gather.ProcessGather(
            strategy, communication, _WHAT
        )
        self._local_ids = self._processes.local_ids

    def read(self, slot: keras_shards.Sharded) -> tf.Tensor:
        """Returns the whole value of the group of the first local replica."""
        return tf.constant(self.of_local_replicas(slot)[0])

    def write(self, slot: keras_shards.Sharded, value: Any) -> None:
        """Writes a whole value to all replicas of this process."""
        assign(slot, [value] * len(self._local_ids), self._local_ids)

    def fill(self, shards: keras_shards.Sharded, weight: Any) -> None:
        """Fills a weight's shards from the weight, on each local replica."""
        values = replica_variables.copies(weight)
        if len(values) == 1:
            values *= len(self._local_ids)
        assign(shards, values, self._local_ids)

    def write_into(self, slot: keras_shards.Sharded, variable: Any) -> None:
        """Writes each replica's whole value to its copy of a variable."""
        for copy, value in zip(
            replica_variables.copies(variable),
            self.of_local_replicas(slot),
            strict=True,
        ):
            copy.assign(value)

    def of_local_replicas(self, slot: keras_shards.Sharded) -> list:
        """Returns the whole value of each local replica's group."""
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{slot.name!r}, of an optimizer with shard_update=True, is"
                " read in a graph but outside of strategy.run. Read it outside"
                " of the tf.function. Instead of tf.saved_model.save(model),"
                " use model.export(), which leaves the optimizer out."
            )
        layout = slot.layout
        own = [
            layout.held(np.asarray(copy))
            for copy in replica_variables.copies(slot)
        ]
        payloads = self._processes.gather(b"".join(x.tobytes() for x in own))
        size, dtype = own[0].size, own[0].dtype
        every = np.concatenate([np.frombuffer(p, dtype) for p in payloads])
        return joined(
            layout,
            self._local_ids,
            lambda r: every[r * size : (r + 1) * size],
        )


def joined(
    layout: Any,
    replica_ids: Sequence[int],
    held_by: Callable[[int], np.ndarray],
) -> list[np.ndarray]:
    """Joins what replicas hold to the whole values of their groups."""
    found: dict[int, np.ndarray] = {}
    for r in replica_ids:
        group = layout.groups.group_of(r)
        if group not in found:
            found[group] = layout.joined(
                [held_by(m) for m in layout.holders_of(r)]
            )
    return [found[layout.groups.group_of(r)] for r in replica_ids]


def assign(
    slot: keras_shards.Sharded,
    wholes: Sequence,
    replica_ids: Sequence[int],
) -> None:
    """Assigns each local replica's copy its shard of the whole value."""
    layout = slot.layout
    for copy, whole, r in zip(
        replica_variables.copies(slot), wholes, replica_ids, strict=True
    ):
        if whole is None:
            continue
        with tf.device("CPU"):
            whole = tf.cast(tf.convert_to_tensor(whole), copy.dtype)
            held = layout.stored(copy, whole, layout.position_of(r))
        if held is not copy:
            copy.assign(held)
