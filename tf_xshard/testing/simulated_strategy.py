"""Creates a real `tf.distribute.TPUStrategy` whose cores are logical CPUs."""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_xshard import checks
from tf_xshard.private.jax import tpu_simulation
from tf_xshard.testing import execution
from tf_xshard.testing import replicated_program
from tf_xshard.testing import xla_cpu

_Device = collections.namedtuple("_Device", ["name", "device_type"])

_TASK = "/job:localhost/replica:0/task:0/device:"


def cpu_name(index: int) -> str:
    """Returns the full name of a logical CPU."""
    return f"{_TASK}CPU:{index}"


class Topology(tf.tpu.experimental.Topology):
    """Describes cores that are logical CPUs, numbered across all hosts."""

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
    """Returns a `TPUClusterResolver`'s metadata, as `TPUStrategy` needs it."""

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


class SimulatedTPUStrategy(tf.distribute.TPUStrategy):
    """Executes TPUStrategy's programs with XLA:CPU; see simulated_tpu_strategy.

    Args:
      topology: The fabricated TPU.
      device_assignment: The replicas' cores, or None for the cores in order.
      xla_numbering: The replica that each XLA replica executes.

    Attributes:
      xla_numbering: The argument `xla_numbering`, as a tuple.
    """

    def __init__(
        self,
        topology: Topology,
        device_assignment: tf.tpu.experimental.DeviceAssignment | None,
        xla_numbering: Sequence[int],
    ) -> None:
        self.xla_numbering = tuple(xla_numbering)
        self._step_runner = execution.Runner(self.xla_numbering)
        extended = tpu_simulation.SimulatedTPUExtended(
            self,
            Resolver(topology),
            device_assignment,
            devices=[
                cpu_name(replica) for replica in range(len(xla_numbering))
            ],
            host_of=topology.host_of,
            execute=self._step_runner,
        )
        tf.distribute.Strategy.__init__(self, extended)
        # One handle for all copies of a variable would hide the copies.
        tpu_simulation.disable_packed_variables(self)

    def capture(
        self,
    ) -> contextlib.AbstractContextManager[list[replicated_program.Extraction]]:
        """Collects the programs of this strategy instead of executing them.

        Use this context manager to test a step's communication. It captures the
        programs that this thread traces, for example with
        `get_concrete_function()`. If contexts are nested, the inner context
        gets the programs.

        Yields:
          A list with one `Extraction` for each `strategy.run()` that is traced
          in the context. Its `program.graph_def` holds the replicas'
          operations. In the context, `run()` returns zeros, and no variable
          changes.
        """
        return execution.capture(self._step_runner)

    def __enter__(self) -> SimulatedTPUStrategy:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        xla_cpu.compiled.cache_clear()


def simulated_tpu_strategy(
    num_replicas: int = 8,
    *,
    device_assignment: bool = True,
    replica_permutation: Sequence[int] | None = None,
    num_hosts: int = 1,
) -> SimulatedTPUStrategy:
    """Creates a `tf.distribute.TPUStrategy` that executes without a TPU.

    Use it to run and test TPUStrategy code on any Linux machine. The strategy
    is TensorFlow's own, with a fabricated system of TPU cores. The strategy
    traces the program, TensorFlow lowers it, and XLA:CPU executes it, with one
    XLA replica per TPU core and real replica groups. Label such results
    "simulated TPU (XLA:CPU)". They show what a program computes and
    communicates, not how fast a TPU is, where its rounding differs, or whether
    its memory suffices.

    It runs `fit`, `evaluate`, `predict` and custom loops. An error names each
    construct that it can't run:

    - outside compilation (tf.print, tf.summary and strings in the step);
    - infeed, outfeed and TPU embedding;
    - model parallelism (several cores per replica);
    - `jit_compile=True` around `strategy.run()`.

    Every core is a logical CPU of TensorFlow. The first call configures these
    CPUs, so TensorFlow must not have run anything before. TensorFlow is not
    patched, and other strategies work next to this strategy. At the end of a
    `with strategy` block, all simulated strategies free their compiled
    programs. They compile them again when needed.

    Args:
      num_replicas: The number of replicas, a positive int. Default: 8.
      device_assignment: Whether the strategy is created with
        `experimental_device_assignment`, which fixes XLA's numbering of the
        replicas. Default: True.
      replica_permutation: The replica that each XLA replica executes, a
        permutation of `range(num_replicas)`. It models a TPU without a device
        assignment, on which XLA may number the replicas differently from the
        strategy. Default: None, the same numbers.
      num_hosts: The number of hosts, which share the cores evenly. Each host
        has its own input pipeline. Default: 1.

    Returns:
      The strategy.

    Raises:
      TypeError: If a number is not an int.
      ValueError: If a number is not positive, `num_hosts` does not divide
        `num_replicas`, or `replica_permutation` is not a permutation or is
        given together with a device assignment.
      RuntimeError: If TensorFlow already runs with fewer logical CPUs.

      A step that can't run raises NotImplementedError when it is traced. If its
      shapes are known only at run time, it then raises
      `tf.errors.UnimplementedError` with the same text.

    Example:

    >>> import tensorflow as tf
    >>> from tf_xshard import testing
    >>> strategy = testing.simulated_tpu_strategy(4)
    >>> @tf.function
    ... def ids_summed():
    ...     def on_replica():
    ...         context = tf.distribute.get_replica_context()
    ...         return context.all_reduce(
    ...             "SUM", context.replica_id_in_sync_group
    ...         )
    ...     return strategy.run(on_replica)
    >>> [int(value) for value in strategy.experimental_local_results(
    ...     ids_summed())]
    [6, 6, 6, 6]

    Source: `tf.distribute.TPUStrategy`, whose own trace is executed;
    StableHLO's all_reduce with replica groups.
    """
    num_replicas = checks.positive_integer("num_replicas", num_replicas)
    num_hosts = checks.positive_integer("num_hosts", num_hosts)
    if num_replicas % num_hosts:
        raise ValueError(
            f"{num_replicas} replicas can't be spread evenly over {num_hosts}"
            " hosts. Choose num_hosts so that it divides num_replicas."
        )
    numbering = tuple(range(num_replicas))
    if replica_permutation is not None:
        numbering = _checked_permutation(
            replica_permutation, num_replicas, device_assignment
        )
    _configure_logical_cpus(num_replicas)
    topology = Topology(num_replicas, num_hosts)
    assignment = None
    if device_assignment:
        assignment = tf.tpu.experimental.DeviceAssignment.build(
            topology, num_replicas=num_replicas
        )
    return SimulatedTPUStrategy(topology, assignment, numbering)


def _checked_permutation(
    permutation: Sequence[int], num_replicas: int, device_assignment: bool
) -> tuple[int, ...]:
    if device_assignment:
        raise ValueError(
            "replica_permutation is given together with device_assignment=True,"
            " which fixes XLA's numbering of the replicas. Pass"
            " device_assignment=False."
        )
    numbering = np.asarray(permutation)
    if (
        numbering.dtype.kind not in "iu"
        or sorted(numbering.ravel().tolist()) != list(range(num_replicas))
        or numbering.ndim != 1
    ):
        raise ValueError(
            f"replica_permutation must hold each of 0 to {num_replicas - 1}"
            f" once, got {permutation!r}."
        )
    return tuple(numbering.tolist())


def _configure_logical_cpus(num_replicas: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    if not tpu_simulation.is_initialized():
        configured = tf.config.get_logical_device_configuration(cpu) or []
        if len(configured) < num_replicas:
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * num_replicas
            )
        return
    found = len(tf.config.list_logical_devices("CPU"))
    if found < num_replicas:
        raise RuntimeError(
            f"simulated_tpu_strategy({num_replicas}) needs {num_replicas}"
            f" logical CPUs, but TensorFlow already runs with {found}. Call it"
            " first with the largest number of replicas, before anything"
            " creates a tensor, a variable or another strategy."
        )
