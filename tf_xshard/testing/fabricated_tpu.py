"""A fabricated TPU system, whose cores are logical CPUs of this process."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

_Device = collections.namedtuple("_Device", ["name", "device_type"])

_TASK = "/job:localhost/replica:0/task:0/device:"


def cpu_name(index: int) -> str:
    """Returns the full name of a logical CPU."""
    return f"{_TASK}CPU:{index}"


class Topology(tf.tpu.experimental.Topology):
    """A topology whose cores are logical CPUs, numbered across all hosts."""

    def __init__(self, num_replicas: int, num_hosts: int) -> None:
        per_host = num_replicas // num_hosts
        # If the number is even, chips have two cores, as v2 to v4 have.
        cores = 2 if per_host % 2 == 0 else 1
        chips = per_host // cores
        super().__init__(
            mesh_shape=[chips, num_hosts, 1, cores],
            device_coordinates=np.array(
                [
                    [
                        [chip, host, 0, core]
                        for chip in range(chips)
                        for core in range(cores)
                    ]
                    for host in range(num_hosts)
                ],
                np.int32,
            ),
        )

    def host_of(self, core: str) -> str:
        """Returns the device that hosts a core, its host's first core."""
        index = int(core.rpartition(":")[2])
        return cpu_name(index - index % self.num_tpus_per_task)

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """See the base class."""
        task = self.task_ordinal_at_coordinates(device_coordinates)
        ordinal = self.tpu_device_ordinal_at_coordinates(device_coordinates)
        return cpu_name(task * self.num_tpus_per_task + ordinal)

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """See the base class."""
        task = self.task_ordinal_at_coordinates(device_coordinates)
        return cpu_name(task * self.num_tpus_per_task)


class Resolver(tf.distribute.cluster_resolver.ClusterResolver):
    """The metadata of a `TPUClusterResolver`, all that `TPUStrategy` needs."""

    environment = ""
    tpu_hardware_feature = None

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._num_hosts = topology.num_tasks
        self._num_replicas = topology.num_tasks * topology.num_tpus_per_task

    def get_tpu_system_metadata(self) -> tf.tpu.experimental.TPUSystemMetadata:
        """See `TPUClusterResolver`."""
        return tf.tpu.experimental.TPUSystemMetadata(
            num_cores=self._num_replicas,
            num_hosts=self._num_hosts,
            num_of_cores_per_host=self._num_replicas // self._num_hosts,
            topology=self._topology,
            devices=tuple(
                _Device(f"{_TASK}TPU:{index}", "TPU")
                for index in range(self._num_replicas)
            ),
        )

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """See the base class."""
        return tf.train.ClusterSpec({})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """See the base class."""
        return ""

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: tf.compat.v1.ConfigProto | None = None,
    ) -> dict[str, int]:
        """See the base class."""
        return {"TPU": self._num_replicas}
