"""Executes one program on N replicas, which are N CPU devices of XLA."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
import numpy as np

from tf_xshard.private.jax import tpu_simulation

_NUM_PROGRAMS = 128
# Replicas wait for each other in collectives. Two concurrent executions could
# deadlock, each holding some of the threads that both need.
_lock = threading.Lock()


# XLA ends the process if a replica waits 40 seconds for other replicas in a
# collective, and has no setting for that.
@functools.cache
def _client(num_replicas: int) -> Any:
    # This PJRT client for CPUs comes from jaxlib and belongs to this module.
    # jax's own devices, flags and settings do not change.
    return tpu_simulation.xla_client.make_cpu_client(num_devices=num_replicas)


class Executable:
    """Executes a compiled program."""

    def __init__(self, text: str, num_replicas: int) -> None:
        client = _client(num_replicas)
        self._devices = tuple(client.devices())
        xla_client = tpu_simulation.xla_client
        options = xla_client.CompileOptions()
        options.num_replicas = num_replicas
        options.num_partitions = 1
        options.device_assignment = xla_client.DeviceAssignment.create(
            np.array([[device.id] for device in self._devices], np.int32)
        )
        with tpu_simulation.make_ir_context():
            module = tpu_simulation.ir.Module.parse(text)
            # A parameter that aliases a result would need to be donated.
            if "mhlo.input_output_alias" in module.operation.attributes:
                del module.operation.attributes["mhlo.input_output_alias"]
            self._executable = client.compile_and_load(
                module, xla_client.DeviceList(self._devices), options
            )
        mesh = jax.sharding.Mesh(np.array(self._devices), ("replica",))
        self._sharding = jax.sharding.NamedSharding(
            mesh, jax.sharding.PartitionSpec()
        )

    def __call__(
        self, parameters: list[list[np.ndarray]]
    ) -> list[list[np.ndarray]]:
        """Executes the program."""
        # Without x64, jax narrows 64-bit types to 32 bits. The setting is per
        # thread.
        with _lock, jax.enable_x64(True):
            arrays = [self._on_devices(values) for values in parameters]
            results = self._executable.execute_sharded(arrays)
            by_result = results.disassemble_into_single_device_arrays()
            return [[np.asarray(one) for one in values] for values in by_result]

    def _on_devices(self, values: list[np.ndarray]) -> jax.Array:
        """Makes one array of the replicas' values, all of one shape."""
        # The sharding says "replicated" only to pass one buffer per device. jax
        # does not check whether the buffers are equal.
        buffers = [
            jax.device_put(value, device)
            for value, device in zip(values, self._devices, strict=True)
        ]
        return tpu_simulation.jax_array(values, buffers, self._sharding)


@functools.lru_cache(maxsize=_NUM_PROGRAMS)
def compiled(text: str, num_replicas: int) -> Executable:
    """Compiles a program, or returns the cached executable."""
    return Executable(text, num_replicas)
