"""Reads and writes each replica's own value, bit for bit, outside a step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.collectives import process_gather
from tf_xshard.distribute import replica_variables
from tf_xshard.group_state import merge
from tf_xshard.optimizers.update import slots
from tf_xshard.private.keras import shards as keras_shards

# The strategy's collectives communicate values between processes in chunks of
# about this many bytes (a larger variable is one chunk), to limit the memory in
# use.
_CHUNK_BYTES = 32 << 20


# TensorFlow reads replica 0's value of a distributed variable, and writes one
# value to all replicas.
class ReplicaValues:
    """Reads and writes variables of a strategy, replica by replica.

    All processes must call the methods marked "Collective", with the same
    variables.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        communication: communication_lib.Communication,
    ) -> None:
        self.strategy = strategy
        self.num_replicas = strategy.num_replicas_in_sync
        self.communication = communication
        self._processes = process_gather.ProcessGather(
            strategy, communication, "Reading or writing the state of groups"
        )
        # In the order of `replica_variables.copies`.
        self.local_ids = self._processes.local_ids
        self.num_processes = self._processes.num_processes
        self.rank = self._processes.rank

    def rank_of(self, replica_id: int) -> int:
        """Returns the rank of the process that drives a replica."""
        return replica_id // len(self.local_ids)

    def local(self, variable: Any) -> list[np.ndarray]:
        """Returns the values of `local_ids`; collective if they are sharded."""
        if isinstance(variable, keras_shards.Sharded):
            [values] = self.gather([variable], self.local_ids)
            return values
        return self._copies(variable)

    def _copies(self, variable: Any) -> list[np.ndarray]:
        """Returns the value, or the part, that each of `local_ids` holds."""
        values = [
            np.asarray(copy) for copy in replica_variables.copies(variable)
        ]
        if isinstance(variable, keras_shards.Sharded):
            values = [variable.layout.held(one) for one in values]
        return values if len(values) > 1 else values * len(self.local_ids)

    def assign(self, variable: Any, values: Sequence[np.ndarray]) -> None:
        """Writes one value for each of `local_ids`."""
        if isinstance(variable, keras_shards.Sharded):
            slots.assign(variable, values, self.local_ids)
            return
        refuse_several_values(variable, values)
        # If the variable has one copy, all replicas share one value.
        for copy, value in zip(
            replica_variables.copies(variable), values, strict=False
        ):
            copy.assign(tf.constant(value, copy.dtype))

    def assign_all(self, variable: Any, value: np.ndarray) -> None:
        """Writes one value to this process's replicas."""
        self.assign(variable, [value] * len(self.local_ids))

    def gather_json(self, value: Any) -> list:
        """Gathers a JSON value from each process, by rank. Collective."""
        return [
            json.loads(payload)
            for payload in self._processes.gather(json.dumps(value).encode())
        ]

    def run_on_all_processes(
        self, what: str, function: Callable[[], Any]
    ) -> Any:
        """Calls a function; if one process fails, all raise. Collective."""
        error = result = None
        try:
            result = function()
        except Exception as caught:
            error = caught
        texts = self.gather_json(error and f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise RuntimeError(f"{what} failed on worker {rank}: {text}")
        return result

    def gather(
        self, variables: Sequence, replica_ids: Sequence[int]
    ) -> Iterator[list[np.ndarray]]:
        """Yields each variable's values on some replicas. Collective."""
        # The whole values of a sharded variable are joined from all shards.
        every = range(self.num_replicas)
        wanted = [
            every if isinstance(one, keras_shards.Sharded) else replica_ids
            for one in variables
        ]
        for variable, held in zip(
            variables, self._held(variables, wanted), strict=True
        ):
            if isinstance(variable, keras_shards.Sharded):
                layout = variable.layout
                yield slots.joined(layout, replica_ids, held.__getitem__)
            else:
                yield held

    def _held(
        self, variables: Sequence, wanted: Sequence[Sequence[int]]
    ) -> Iterator[list[np.ndarray]]:
        """Yields the values or shards of each variable that replicas hold."""
        if self.num_processes == 1:
            for variable, replica_ids in zip(variables, wanted, strict=True):
                local = self._copies(variable)
                yield [local[r] for r in replica_ids]
            return
        begin, size = 0, 0
        for index, variable in enumerate(variables):
            copy = replica_variables.copies(variable)[0]
            size += copy.dtype.size * int(np.prod(_shape_of_copies(variable)))
            if size >= _CHUNK_BYTES or index == len(variables) - 1:
                chunk = slice(begin, index + 1)
                yield from self._exchanged(variables[chunk], wanted[chunk])
                begin, size = index + 1, 0

    def _exchanged(
        self, variables: Sequence, wanted: Sequence[Sequence[int]]
    ) -> Iterator[list[np.ndarray]]:
        """Yields the same as `_held`, for variables gathered together."""
        parts = []
        for variable, replica_ids in zip(variables, wanted, strict=True):
            local = dict(
                zip(self.local_ids, self._copies(variable), strict=True)
            )
            parts += [local[r].tobytes() for r in replica_ids if r in local]
        payloads = self._processes.gather(b"".join(parts))
        offsets = [0] * self.num_processes
        for variable, replica_ids in zip(variables, wanted, strict=True):
            copy = replica_variables.copies(variable)[0]
            shape = _shape_of_copies(variable)
            count = int(np.prod(shape))
            found = []
            # A process sends its replicas' values in this order.
            for r in replica_ids:
                rank = self.rank_of(r)
                found.append(
                    np.frombuffer(
                        payloads[rank],
                        copy.dtype.as_numpy_dtype,
                        count,
                        offsets[rank],
                    ).reshape(shape)
                )
                offsets[rank] += found[-1].nbytes
            yield found

    def of_group(
        self, variables: Sequence, members: Sequence[int]
    ) -> list[np.ndarray]:
        """Returns one value of each variable for a group. Collective."""
        return [
            merge.combined(values) for values in self.gather(variables, members)
        ]

    def assign_groups(
        self,
        variable: Any,
        groups: group_assignment_lib.GroupAssignment,
        of_group: Mapping[int, Any],
    ) -> None:
        """Writes a value to all replicas of some groups."""
        self.assign(variable, self.of_groups(variable, groups, of_group))

    def of_groups(
        self,
        variable: Any,
        groups: group_assignment_lib.GroupAssignment,
        of_group: Mapping[int, Any],
    ) -> list:
        """Returns the values of `local_ids` after `assign_groups`."""
        own = [groups.group_of(r) for r in self.local_ids]
        if isinstance(variable, keras_shards.Sharded):
            # None leaves a shard as it is, without gathering the whole value.
            return [of_group.get(group) for group in own]
        return [
            of_group.get(group, value)
            for group, value in zip(own, self.local(variable), strict=True)
        ]

    def digests(self, variables: Sequence) -> list[list[str]]:
        """Digests the bits of each variable on each replica. Collective."""
        own = []
        for variable in variables:
            seen = {}
            for one in self._copies(variable):
                # If a variable has one copy, its values are one object.
                if id(one) not in seen:
                    seen[id(one)] = _digest(one)
                own.append(seen[id(one)])
        width = len(self.local_ids)
        result: list[list[str]] = [[] for _ in variables]
        for of_process in self.gather_json(own):
            for index, row in enumerate(result):
                row += of_process[index * width : (index + 1) * width]
        return [
            _of_groups(variable, row)
            if isinstance(variable, keras_shards.Sharded)
            else row
            for variable, row in zip(variables, result, strict=True)
        ]


def refuse_several_values(variable: Any, values: Sequence) -> None:
    """Raises ValueError if replicas that share a copy get several values."""
    if isinstance(variable, keras_shards.Sharded) or (
        len(replica_variables.copies(variable)) == len(values)
    ):
        return
    first, *others = (np.asarray(one).tobytes() for one in values)
    if any(one != first for one in others):
        raise ValueError(
            f"{variable.name!r} was created outside of the strategy's scope:"
            " all replicas share one value, so groups can't have different"
            " values. No value was changed. Create it in the scope."
        )


def _shape_of_copies(variable: Any) -> tuple[int, ...]:
    """Returns the shape of each of `ReplicaValues._copies`."""
    if isinstance(variable, keras_shards.Sharded):
        return (variable.layout.size,)
    return tuple(replica_variables.copies(variable)[0].shape)


def _of_groups(variable: keras_shards.Sharded, shards: list[str]) -> list[str]:
    """Computes digests of whole values from the digests of their shards."""
    layout = variable.layout
    return [
        _digest(
            np.frombuffer(
                "".join(shards[m] for m in layout.holders_of(r)).encode(),
                np.uint8,
            )
        )
        for r in range(len(shards))
    ]


def _digest(value: np.ndarray) -> str:
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()
