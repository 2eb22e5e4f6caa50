"""Gathers bytes from every process, outside of `strategy.run`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_xshard import collectives
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import site as site_lib
from tf_xshard.private.tensorflow import runtime


class ProcessGather:
    """Communicates between the processes of a strategy.

    All processes must call the same methods in the same order. `local_ids` are
    the ids of the replicas that this process drives. Errors begin with `what`.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        communication: communication_lib.Communication,
        what: str,
    ) -> None:
        self._what = what
        self._strategy = strategy
        self._communication = communication
        self._every = group_assignment_lib.GroupAssignment.single(
            strategy.num_replicas_in_sync
        )
        self.local_ids = site_lib.local_replica_ids(strategy)
        self.num_processes = self._every.num_replicas // len(self.local_ids)
        self.rank = site_lib.rank(strategy)

    def gather(self, payload: bytes) -> list[bytes]:
        """Gathers a payload from every process, by rank. Collective.

        Raises RuntimeError, with the name of a worker that does not take part.
        """
        if self.num_processes == 1:
            return [payload]
        self.exchange("")
        sizes = self._all_gather(np.array([len(payload)], np.int64))[:, 0]
        # Rows are padded to powers of two, so that few shapes are traced.
        width = 1 << int(max(sizes) // 8).bit_length()
        padded = payload + bytes(8 * width - len(payload))
        rows = self._all_gather(np.frombuffer(padded, np.int64))
        return [
            row.tobytes()[:size] for row, size in zip(rows, sizes, strict=True)
        ]

    def exchange(self, text: str) -> list[str]:
        """Gathers a short text from every process, by rank.

        No collective is run, so this method can be called again after a
        timeout. Raises RuntimeError, with the name of a worker that does not
        call it for the same `what`.
        """
        if self.num_processes == 1:
            return [text]
        seconds = self._communication.timeout_seconds
        return runtime.rendezvous(
            f"tf_xshard/rendezvous/{self._what}",
            text,
            range(self.num_processes),
            seconds,
            lambda worker: RuntimeError(
                f"{self._what}: {worker} did not call this method within"
                f" {seconds} seconds (Communication.timeout_seconds). It needs"
                " all workers, so call it on every worker, not only on the"
                " chief. If this worker has ended, see its output."
            ),
        )

    def _all_gather(self, numbers: np.ndarray) -> np.ndarray:
        """Stacks the int64 numbers of all processes, by rank."""
        # One replica of each process contributes its numbers.
        own = self._strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                numbers
                if int(context.replica_id_in_sync_group) == self.local_ids[0]
                else numbers[:0]
            )
        )
        # A concrete function is a graph even with
        # tf.config.run_functions_eagerly(True).
        gathered = self._function.get_concrete_function(own)(own)
        local: Sequence = self._strategy.experimental_local_results(gathered)
        # The rows come in the order of the replicas' positions.
        [by_position] = site_lib.ranked(self._every, self._strategy)
        ranks = [r // len(self.local_ids) for r in by_position]
        rows = np.asarray(local[0]).reshape(self.num_processes, -1)
        return rows[np.argsort(list(dict.fromkeys(ranks)))]

    @functools.cached_property
    def _function(self) -> Any:
        every = self._every

        def on_replica(value: tf.Tensor) -> tf.Tensor:
            transport = collectives.transport_for(
                site_lib.current(),
                transport_lib.Channel(every, self._communication),
            )
            [gathered] = transport.gather([value])
            return gathered

        return tf.function(
            lambda own: self._strategy.run(on_replica, (own,)), autograph=False
        )
