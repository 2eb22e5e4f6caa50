"""Reads and writes each replica's values, outside of `strategy.run`.

TensorFlow shows replica 0's value of a distributed variable and writes a value
to all replicas. Here each replica's own value is read and written, bit by bit;
values of other processes are communicated by the strategy's collectives, as
gradients are.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_xshard import collectives
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import replica_context
from tf_xshard.distribute import replica_variables
from tf_xshard.group_state import combine

# Values are communicated between processes in chunks of about this many bytes
# (a larger variable is one chunk), to limit the memory in use.
_CHUNK_BYTES = 32 << 20


class ReplicaValues:
    """Reads and writes variables of a strategy, replica by replica.

    With several processes, the methods marked "Collective" must be called by
    all of them, with the same variables.

    Args:
      strategy: A `tf.distribute.Strategy`.
      communication: A `Communication`, whose timeout applies.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        communication: communication_lib.Communication,
    ) -> None:
        self.strategy = strategy
        self.num_replicas = strategy.num_replicas_in_sync
        self.communication = communication
        # In the order of `copies`.
        self.local_ids = replica_context.local_replica_ids(strategy)
        self.num_processes = self.num_replicas // len(self.local_ids)
        self.rank = replica_context.rank(strategy)

    def rank_of(self, replica_id: int) -> int:
        """The rank of the process that drives a replica."""
        return replica_id // len(self.local_ids)

    def local(self, variable: Any) -> list[np.ndarray]:
        """This process's values, one for each of `local_ids`."""
        values = [
            np.asarray(copy) for copy in replica_variables.copies(variable)
        ]
        return values if len(values) > 1 else values * len(self.local_ids)

    def assign(self, variable: Any, values: Sequence[np.ndarray]) -> None:
        """Writes this process's values, one for each of `local_ids`."""
        # With one copy, all replicas share one value.
        for copy, value in zip(
            replica_variables.copies(variable), values, strict=False
        ):
            copy.assign(tf.constant(value, copy.dtype))

    def assign_all(self, variable: Any, value: np.ndarray) -> None:
        """Writes one value to this process's replicas."""
        self.assign(variable, [value] * len(self.local_ids))

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Gathers a payload from every process, by rank. Collective."""
        if self.num_processes == 1:
            return [payload]
        sizes = self._all_gather(np.array([len(payload)], np.int64))
        # Powers of two, so that few shapes are traced.
        width = 1 << int(max(sizes) // 8).bit_length()
        padded = payload + bytes(8 * width - len(payload))
        rows = self._all_gather(np.frombuffer(padded, np.int64))
        return [
            row.tobytes()[:size]
            for row, size in zip(
                rows.reshape(self.num_processes, width), sizes, strict=True
            )
        ]

    def _all_gather(self, numbers: np.ndarray) -> np.ndarray:
        """Concatenates the int64 numbers of all processes."""
        # One replica of each process contributes its numbers.
        own = self.strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                numbers
                if int(context.replica_id_in_sync_group) == self.local_ids[0]
                else numbers[:0]
            )
        )
        # As a graph, even with tf.config.run_functions_eagerly(True).
        gathered = self._gather_function.get_concrete_function(own)(own)
        return np.asarray(self.strategy.experimental_local_results(gathered)[0])

    @functools.cached_property
    def _gather_function(self) -> Any:
        every = group_assignment_lib.GroupAssignment.single(self.num_replicas)

        def on_replica(value: tf.Tensor) -> tf.Tensor:
            transport = collectives.choose(
                replica_context.current(), every, self.communication
            )
            [gathered] = transport.gather([value])
            return gathered

        return tf.function(
            lambda own: self.strategy.run(on_replica, (own,)), autograph=False
        )

    def gather_json(self, value: Any) -> list:
        """The same for values that JSON can represent. Collective."""
        return [
            json.loads(payload)
            for payload in self.gather_bytes(json.dumps(value).encode())
        ]

    def run_on_all_processes(
        self, what: str, function: Callable[[], Any]
    ) -> Any:
        """Calls a function; if it fails on one process, all raise. Collective.

        Args:
          what: What the function does, for the error.
          function: Called on every process. Must not be a collective.

        Returns:
          The function's result on this process.

        Raises:
          Its own error, or RuntimeError for that of another process.
        """
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
        """The values that some replicas hold, variable by variable. Collective.

        Args:
          variables: The variables.
          replica_ids: Ids of replicas.

        Yields:
          For each variable a list of values, in the order of `replica_ids`.
        """
        if self.num_processes == 1:
            for variable in variables:
                local = self.local(variable)
                yield [local[r] for r in replica_ids]
            return
        chunk, size = [], 0
        for index, variable in enumerate(variables):
            chunk.append(variable)
            size += replica_variables.copies(variable)[0].dtype.size * int(
                np.prod(variable.shape)
            )
            if size >= _CHUNK_BYTES or index == len(variables) - 1:
                yield from self._gathered(chunk, replica_ids)
                chunk, size = [], 0

    def _gathered(
        self, variables: Sequence, replica_ids: Sequence[int]
    ) -> Iterator[list[np.ndarray]]:
        """`gather` for a few variables, in one exchange."""
        own = [r for r in replica_ids if r in self.local_ids]
        parts = []
        for variable in variables:
            local = dict(zip(self.local_ids, self.local(variable), strict=True))
            parts += [local[r].tobytes() for r in own]
        payloads = self.gather_bytes(b"".join(parts))
        offsets = [0] * self.num_processes
        for variable in variables:
            found = {}
            dtype = replica_variables.copies(variable)[0].dtype.as_numpy_dtype
            shape = tuple(variable.shape)
            count = int(np.prod(shape))
            for r in replica_ids:
                rank = self.rank_of(r)
                found[r] = np.frombuffer(
                    payloads[rank], dtype, count, offsets[rank]
                ).reshape(shape)
                offsets[rank] += found[r].nbytes
            yield [found[r] for r in replica_ids]

    def of_group(
        self, variables: Sequence, members: Sequence[int]
    ) -> list[np.ndarray]:
        """One value of each variable for a group of replicas. Collective.

        Args:
          variables: The variables.
          members: The ids of the group's replicas.

        Returns:
          The replicas' value where they are bitwise equal, else their mean, see
          `combine.combined`.
        """
        return [
            combine.combined(values)
            for values in self.gather(variables, members)
        ]

    def assign_groups(
        self,
        variable: Any,
        groups: group_assignment_lib.GroupAssignment,
        of_group: Mapping[int, Any],
    ) -> None:
        """Writes a value to all replicas of some groups.

        Args:
          variable: The variable.
          groups: Which replica is in which group.
          of_group: A value by group index; other groups keep theirs.
        """
        own = [groups.group_of(r) for r in self.local_ids]
        current = self.local(variable)
        self.assign(
            variable,
            [
                of_group.get(group, value)
                for group, value in zip(own, current, strict=True)
            ],
        )

    def digests(self, variables: Sequence) -> list[list[str]]:
        """A digest of the value of every variable on every replica.

        Equal digests mean equal bits. Collective.

        Returns:
          For each variable a list, in the order of replica ids.
        """
        own = []
        for variable in variables:
            seen = {}
            for one in self.local(variable):
                # If a variable has one copy, its values are one object.
                if id(one) not in seen:
                    seen[id(one)] = _digest(one)
                own.append(seen[id(one)])
        width = len(self.local_ids)
        result: list[list[str]] = [[] for _ in variables]
        for of_process in self.gather_json(own):
            for index, row in enumerate(result):
                row += of_process[index * width : (index + 1) * width]
        return result


def _digest(value: np.ndarray) -> str:
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()
