"""Sums over groups with `CollectiveReduceV2`, one group key per group.

The GPUs of one process communicate by NCCL; CPUs and logical GPUs form a ring.
Across processes, the strategy's `CommunicationOptions` decide. Needs a
`tf.function`; works inside `tf.cond`, `tf.while_loop` and with
steps_per_execution > 1.

A group key names a set of devices. An instance key names an operation of that
set. Both keys are hashes of the devices or the operation, not counters.
Processes that created their optimizers in a different order therefore have the
same keys. A retrace on one worker can't shift the other workers' keys. Calls
are paired by each device's program order, which the ordering tokens enforce.

Without NCCL, TensorFlow's all-to-all joins the ranks of source and destination
into a message's key, so 1 to 10 and 11 to 0 have the same key. A larger group,
with several replicas in one process, therefore exchanges its rows in several
all-to-alls, which send up to twice the bytes. Other collectives separate the
parts of their keys.

Within one process, optimizers have separate instance keys and tokens, since
several threads may train at the same time. Across processes, optimizers share
keys and tokens, so only one thread of each process may train.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.collectives import recorder
from tf_xshard.collectives import runtime_variables
from tf_xshard.collectives import transport
from tf_xshard.collectives import watchdog
from tf_xshard.distribute import site as site_lib

# tf.distribute counts its group keys up from 1 (its tests from multiples of
# 100,000). Using a key with two group sizes aborts every collective of the
# process, so the keys of this module start far above.
_FIRST_GROUP_KEY = 1 << 30
_GROUP_KEYS = 1 << 30
# An instance key is permanently bound to one shape. Rows of IndexedSlices are
# padded to a power of two, whose exponent is in the key's lowest bits.
_EXPONENT_BITS = 5
_FIRST_GATHER_KEY = 1 << 30
_GATHER_KEYS = 1 << (30 - _EXPONENT_BITS)
# In an all-to-all of 12, two messages have the same key.
_MOST_IN_ALL_TO_ALL = 11


def _hash(*parts: Any) -> int:
    return zlib.crc32("|".join(map(str, parts)).encode())


def _instance_key(kind: str, *parts: Any) -> int:
    if kind == recorder.ALL_GATHER:
        key = _hash(*parts) % _GATHER_KEYS << _EXPONENT_BITS
        return _FIRST_GATHER_KEY + key
    if kind == recorder.REDUCE_SCATTER:
        parts = "all_to_all", *parts
    return _hash(*parts) % _FIRST_GATHER_KEY


class Subgroups(transport.Transport):
    """Communicates in this replica's group, in a `tf.function`."""

    name = "subgroup collectives (CollectiveReduceV2)"
    packs = True
    gathers = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        site, groups = self.site, self.groups
        assert site.replica_id is not None, site
        self._members = tuple(groups)[groups.group_of(site.replica_id)]
        self._devices = site_lib.device_names(site.strategy)
        # Operations on one token run one after another, so several tokens allow
        # several buckets in flight. NCCL needs the same order on all devices,
        # so GPUs have one lane.
        in_flight = self.communication.buckets_in_flight
        self._lanes = 1 if "GPU" in site.device else in_flight
        # Processes may number their channels differently, so all channels
        # across processes have the number 0.
        self._number = self.channel.number if site.num_processes == 1 else 0

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.sum`."""
        return [self._all_reduce(*one) for one in enumerate(tensors)]

    def reduce_scatter(self, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.reduce_scatter`."""
        # Only NCCL has CollectiveReduceScatterV2. This sends as many bytes.
        return list(map(transport.sum_of_rows, self.all_to_all(rows)))

    def all_to_all(self, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.all_to_all`."""
        return [self._all_to_all(*one) for one in enumerate(rows)]

    def all_gather(self, shards: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.all_gather`."""
        return [self._stack(*one) for one in enumerate(shards)]

    def gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.gather`."""
        num_rows = tf.stack([tf.shape(t, tf.int64)[0] for t in tensors])
        # Each replica's number of rows of each tensor, of shape [group_size,
        # len(tensors)].
        with recorder.labelled("numbers of rows", counts=[0]):
            all_rows = self._all_gather(0, num_rows[tf.newaxis])
        gathered = []
        for position, tensor in enumerate(tensors):
            rows = all_rows[:, position]
            padded_rows = _next_power_of_two(tf.reduce_max(rows))
            padding = [[0, padded_rows - num_rows[position]]]
            padding += [[0, 0]] * (tensor.shape.rank - 1)
            padded = tf.pad(tensor, padding)
            padded = tf.ensure_shape(padded, [None, *tensor.shape[1:]])
            blocks = self._all_gather(position, padded)
            is_row = tf.reshape(tf.sequence_mask(rows, padded_rows), [-1])
            gathered.append(tf.boolean_mask(blocks, is_row))
        return gathered

    def _all_reduce(self, position: int, tensor: tf.Tensor) -> tf.Tensor:
        # On GPUs, TensorFlow's all-reduce does not support bfloat16.
        if "GPU" in self.site.device and tensor.dtype == tf.bfloat16:
            return transport.sum_by_parts(
                tensor,
                self.groups.group_size,
                functools.partial(self._all_to_all, position),
                functools.partial(self._stack, position),
            )
        add = functools.partial(
            tf.raw_ops.CollectiveReduceV2, merge_op="Add", final_op="Id"
        )
        return self._run(
            add, recorder.ALL_REDUCE, position, tensor, self._members
        )

    def _all_to_all(self, position: int, rows: tf.Tensor) -> tf.Tensor:
        """Sends row i to the replica at position i of the group."""
        members = self._members
        processes = {r // self.site.num_local_replicas for r in members}
        if (
            len(members) <= _MOST_IN_ALL_TO_ALL
            or len(processes) == len(members)
            or _hint(self.site) == "nccl"
        ):
            return self._exchange(position, rows, members)
        received = tf.unstack(rows)
        for indices in _exchanges(
            len(members), members.index(self.site.replica_id)
        ):
            parts = self._exchange(
                position,
                tf.gather(rows, indices),
                [members[i] for i in indices],
            )
            for i, part in zip(indices, tf.unstack(parts), strict=True):
                received[i] = part
        return tf.stack(received)

    def _exchange(
        self, position: int, rows: tf.Tensor, members: Sequence[int]
    ) -> tf.Tensor:
        """Sends row i to `members[i]`."""
        received = self._run(
            tf.raw_ops.CollectiveAllToAllV2,
            recorder.REDUCE_SCATTER,
            position,
            rows,
            members,
        )
        return tf.ensure_shape(received, rows.shape)

    def _stack(self, position: int, shard: tf.Tensor) -> tf.Tensor:
        return self._all_gather(position, shard[tf.newaxis])

    def _all_gather(self, position: int, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates tensors; an unknown number of rows is a power of two."""
        exponent = 0
        if tensor.shape[0] is None:
            rows = tf.cast(tf.shape(tensor)[0], tf.float32)
            exponent = tf.cast(
                tf.math.round(tf.math.log(rows) / tf.math.log(2.0)), tf.int32
            )

        return self._run(
            tf.raw_ops.CollectiveGatherV2,
            recorder.ALL_GATHER,
            position,
            tensor,
            self._members,
            exponent,
        )

    def _run(
        self,
        operation: Callable,
        kind: str,
        position: int,
        tensor: tf.Tensor,
        members: Sequence[int],
        exponent: int | tf.Tensor = 0,
    ) -> tf.Tensor:
        """Runs a collective between some replicas."""
        cost = self._note(kind, tensor, position)
        dtype = tensor.dtype
        # TensorFlow sums bfloat16 (on CPUs), but does not move it.
        if dtype == tf.bfloat16 and kind != recorder.ALL_REDUCE:
            tensor = tf.bitcast(tensor, tf.float16)
        device = self.site.device
        lane = f"{self._number}_{position % self._lanes}"
        # Each device has its own token. Otherwise, automatic control
        # dependencies would serialize the collectives of all devices, which
        # would then wait for each other.
        # A GPU has one token for all channels, since a step may use several
        # channels (an optimizer's and a GlobalMean's) in no fixed order.
        token_lane = "0_0" if "GPU" in device else lane
        token = runtime_variables.handle(
            device, f"tf_xshard_ordering_token_{token_lane}", tf.float32
        )
        devices = [self._devices[r] for r in members]
        key = _instance_key(kind, lane, dtype.name, tensor.shape.as_list())
        result = watchdog.run(
            lambda: operation(
                input=tensor,
                group_size=len(members),
                group_key=_FIRST_GROUP_KEY + _hash(*devices) % _GROUP_KEYS,
                instance_key=key + exponent,
                ordering_token=[token],
                communication_hint=_hint(self.site),
                # The watchdog has the timeout.
                timeout_seconds=0,
            ),
            [tensor, *filter(None, [self.site.check])],
            device,
            lane,
            float(self.communication.timeout_seconds),
            cost,
        )
        return result if result.dtype == dtype else tf.bitcast(result, dtype)


def _exchanges(group_size: int, position: int) -> list[list[int]]:
    """Divides an all-to-all; returns the positions in each exchange."""
    # Each pair of parts of the group exchanges its rows. All replicas have the
    # same order of pairs. Otherwise, they would wait for each other.
    count = -(-group_size // (_MOST_IN_ALL_TO_ALL // 2))
    bounds = [group_size * k // count for k in range(count + 1)]
    parts = [range(low, high) for low, high in itertools.pairwise(bounds)]
    return [
        [*one, *other]
        for one, other in itertools.combinations(parts, 2)
        if position in one or position in other
    ]


def _hint(site: site_lib.Site) -> str:
    """Returns how TensorFlow should communicate: "nccl" or "auto"."""
    # "auto" is a ring, also on GPUs, unless a MultiWorkerMirroredStrategy was
    # made with CommunicationImplementation.NCCL. MirroredStrategy's own
    # collectives use NCCL, but not on logical GPUs: NCCL has one rank per GPU.
    if site.kind != "mirrored" or "GPU" not in site.device:
        return "auto"
    return "auto" if site_lib.has_split_gpus() else "nccl"


def _next_power_of_two(rows: tf.Tensor) -> tf.Tensor:
    doubled = functools.reduce(
        lambda bits, shift: tf.bitwise.bitwise_or(
            bits, tf.bitwise.right_shift(bits, tf.constant(shift, tf.int64))
        ),
        (1, 2, 4, 8, 16),
        tf.maximum(rows - 1, 0),
    )
    return doubled + 1
