"""Executes one program on N replicas, which are N CPU devices of XLA.

The PJRT client for CPUs comes from jaxlib and is this module's own: jax's
devices, flags and settings stay as they are. A replica that waits 40 seconds
for the others in a collective ends the process; XLA has no setting for it.
"""

from __future__ import annotations

import functools
import threading

import jax
import numpy as np

from tf_xshard.private import tpu_simulation

_NUM_PROGRAMS = 128
# Replicas wait for each other in collectives. Two executions at a time could
# each hold a part of the threads that both need.
_lock = threading.Lock()


@functools.cache
def _client(num_replicas: int):
    return tpu_simulation.xla_client.make_cpu_client(num_devices=num_replicas)


class Executable:
    """A compiled program.

    Args:
      text: The program, in StableHLO.
      num_replicas: On how many replicas it runs.
    """

    def __init__(self, text: str, num_replicas: int):
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
            # Parameters that alias results would have to be given away.
            if "mhlo.input_output_alias" in module.operation.attributes:
                del module.operation.attributes["mhlo.input_output_alias"]
            self._executable = client.compile_and_load(
                module, xla_client.DeviceList(self._devices), options
            )
        mesh = jax.sharding.Mesh(np.array(self._devices), ("replica",))
        self._sharding = jax.sharding.NamedSharding(
            mesh, jax.sharding.PartitionSpec()
        )

    def __call__(self, parameters: list[list[np.ndarray]]) -> list[list]:
        """Executes the program.

        Args:
          parameters: For each parameter, its value on each replica.

        Returns:
          For each result, its value on each replica.
        """
        # Without x64 jax makes 32 bits of 64; the setting is this thread's.
        with _lock, jax.enable_x64(True):
            arrays = [self._on_devices(values) for values in parameters]
            results = self._executable.execute_sharded(arrays)
            by_result = results.disassemble_into_single_device_arrays()
            return [[np.asarray(one) for one in values] for values in by_result]

    def _on_devices(self, values):
        # The sharding says "replicated", which is only a way to hand over one
        # buffer per device: jax never looks whether they are equal.
        buffers = [
            jax.device_put(value, device)
            for value, device in zip(values, self._devices, strict=True)
        ]
        return tpu_simulation.jax_array(values, buffers, self._sharding)


@functools.lru_cache(maxsize=_NUM_PROGRAMS)
def compiled(text: str, num_replicas: int) -> Executable:
    """Compiles a program, once.

    Args:
      text: The program, in StableHLO.
      num_replicas: On how many replicas it runs.

    Returns:
      The `Executable`.
    """
    return Executable(text, num_replicas)
