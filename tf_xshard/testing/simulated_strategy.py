"""A real `tf.distribute.TPUStrategy` whose replicas XLA:CPU executes."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tf_xshard.private import tpu_simulation
from tf_xshard.testing import execution
from tf_xshard.testing import fabricated_tpu
from tf_xshard.testing import replicated_program
from tf_xshard.testing import xla_cpu

_recording = threading.local()


@contextlib.contextmanager
def recorded() -> Iterator[list[replicated_program.Extraction]]:
    """Collects the programs traced inside, which then do not execute."""
    assert getattr(_recording, "programs", None) is None, "nested"
    _recording.programs = []
    try:
        yield _recording.programs
    finally:
        _recording.programs = None


class _SimulatedTPUExtended(tpu_simulation.TPUExtended):
    """TPUStrategy's own implementation, but for what executes a program."""

    def __init__(self, strategy, topology, device_assignment, xla_numbering):
        super().__init__(
            strategy,
            fabricated_tpu.Resolver(topology),
            device_assignment=device_assignment,
        )
        # The replica that each XLA replica executes.
        self._xla_numbering = xla_numbering
        if device_assignment is None:
            self._tpu_devices = np.array(
                [
                    [fabricated_tpu.cpu_name(r)]
                    for r in range(len(xla_numbering))
                ],
                dtype=object,
            )
        # The base class takes CPU:0 for the host of every core.
        hosts = collections.OrderedDict()
        for core in self._tpu_devices[:, 0]:
            hosts.setdefault(topology.host_of(core), []).append(core)
        self._host_device = next(iter(hosts))
        self._device_input_worker_devices = hosts
        self._host_input_worker_devices = collections.OrderedDict(
            (host, [host] * len(cores)) for host, cores in hosts.items()
        )

    def _tpu_function_creator(self, fn, options):
        if not tf.executing_eagerly():
            return lambda args, kwargs: self._run(fn, args, kwargs, options)
        # As the base class does: one tf.function for each function.
        if fn not in self._tpu_function_cache:
            self._tpu_function_cache[fn] = tf.function(
                lambda args, kwargs: self._run(fn, args, kwargs, options),
                autograph=False,
            )
        return self._tpu_function_cache[fn]

    def _run(self, fn, args, kwargs, options):
        """Traces `fn` as TPUStrategy does, and executes what was traced."""
        if tf.__internal__.get_enclosing_xla_context() is not None:
            raise NotImplementedError(
                "strategy.run() is called inside a"
                " tf.function(jit_compile=True). TPUStrategy compiles what"
                " run() gets by itself: take off jit_compile=True (for a Keras"
                " model: compile(jit_compile=False))."
            )
        traced = tf.__internal__.FuncGraph("replicated")
        with (
            traced.as_default(),
            tpu_simulation.AutomaticControlDependencies(),
        ):
            genuine = super()._tpu_function_creator(fn, options)
            results = genuine(args, kwargs)
        outputs, done = None, ()
        if replicated_program.creates_variables(traced):
            # tf.function traces once more when it has the variables, and runs
            # this graph only if it could not initialize them before the step.
            done = [
                tf.debugging.Assert(
                    False,
                    [
                        "strategy.run() got a function that creates variables"
                        " whose initial values depend on its arguments. Create"
                        " them in strategy.scope(), before the step."
                    ],
                )
            ]
        else:
            extraction = replicated_program.extract(
                traced, self._num_replicas_in_sync
            )
            recording = getattr(_recording, "programs", None)
            if recording is not None:
                recording.append(extraction)
            else:
                outputs, done = execution.emit(
                    extraction, traced, self._xla_numbering
                )

        positions = replicated_program.output_positions(traced)

        def result_of(value):
            if isinstance(value, tf.Operation):
                return tf.no_op()
            if not tf.is_tensor(value):
                return value
            if outputs is None:  # Nothing executes; the type is right.
                return tf.zeros([s or 1 for s in value.shape], value.dtype)
            while value.op.name not in positions:  # An identity of it.
                (value,) = value.op.inputs
            index = positions[value.op.name]
            return _without_gradient(outputs[value.value_index][index])

        with tf.control_dependencies(done):
            return tf.nest.map_structure(
                result_of, results, expand_composites=True
            )


def _without_gradient(value: tf.Tensor) -> tf.Tensor:
    """What a replica returns; on a TPU, too, it has no gradient."""
    return tf.raw_ops.PreventGradient(
        input=value,
        message="it is asked for through strategy.run(), from outside. What a"
        " TPU program returns has none (TPUReplicatedOutput): open the"
        " GradientTape in the function that strategy.run() gets.",
    )


class SimulatedTPUStrategy(tf.distribute.TPUStrategy):
    """See `simulated_tpu_strategy`, which makes one."""

    def __init__(self, topology, device_assignment, xla_numbering):
        tf.distribute.Strategy.__init__(
            self,
            _SimulatedTPUExtended(
                self, topology, device_assignment, xla_numbering
            ),
        )
        # One handle for all copies of a variable would hide the copies.
        self._enable_packed_variable_in_eager_mode = False

    def __enter__(self) -> SimulatedTPUStrategy:
        return self

    def __exit__(self, *error) -> None:
        xla_cpu.compiled.cache_clear()


def simulated_tpu_strategy(
    num_replicas: int = 8,
    *,
    device_assignment: bool = True,
    replica_permutation: Sequence[int] | None = None,
    num_hosts: int = 1,
) -> tf.distribute.TPUStrategy:
    """A `tf.distribute.TPUStrategy` that executes with no TPU.

    For running and testing TPUStrategy code on any Linux machine. The strategy
    is TensorFlow's own, over a system of TPU cores that exists on paper; the
    program that it traces and that TensorFlow lowers is executed by XLA:CPU
    with one XLA replica for each TPU core and real replica groups. Say
    "simulated TPU (XLA:CPU)" of what ran on it: it shows what a program
    computes and communicates, not how fast a TPU is, what it rounds
    differently, and what its memory holds.

    It runs `fit`, `evaluate`, `predict` and custom loops. What a TPU's host
    or its embedding cores do is refused by name: outside compilation (tf.print,
    tf.summary and strings in the step), infeed and outfeed, TPU embedding;
    model parallelism (several cores per replica), too, and
    `jit_compile=True` around `strategy.run()`.

    Every core is a logical CPU of TensorFlow. The first call configures them,
    for which TensorFlow must not have run anything yet. Nothing of TensorFlow
    is patched: other strategies work beside it. As a context manager it frees
    what was compiled so far, for all simulated strategies; what is used later
    is compiled again.

    Args:
      num_replicas: The number of replicas, a positive int. Default: 8.
      device_assignment: Whether the strategy is made with
        `experimental_device_assignment`, which fixes XLA's numbering of
        replicas. Default: True.
      replica_permutation: The replica that each XLA replica is, a permutation
        of `range(num_replicas)`. It models a TPU whose XLA numbering is not
        the strategy's, which can be so without a device assignment only.
        Default: None, equal numbers.
      num_hosts: Over how many hosts the cores are spread, evenly. Each host
        has an input pipeline of its own. Default: 1.

    Returns:
      The strategy.

    Raises:
      TypeError: If a number is no int.
      ValueError: If a number does not fit, or the permutation is none or comes
        with a device assignment.
      RuntimeError: If TensorFlow runs already, with fewer logical CPUs.

      What can't run raises NotImplementedError where the step is traced; where
      its shapes are known at run time only, the step raises the same text then,
      as `tf.errors.UnimplementedError`.

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

    Source: `tf.distribute.TPUStrategy`, whose own trace is what runs, and
    StableHLO's all_reduce with replica groups.
    """
    num_replicas = _positive("num_replicas", num_replicas)
    num_hosts = _positive("num_hosts", num_hosts)
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
    topology = fabricated_tpu.Topology(num_replicas, num_hosts)
    assignment = None
    if device_assignment:
        assignment = tf.tpu.experimental.DeviceAssignment.build(
            topology, num_replicas=num_replicas
        )
    return SimulatedTPUStrategy(topology, assignment, numbering)


def _positive(name: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be positive, got {value}.")
    return int(value)


def _checked_permutation(permutation, num_replicas, device_assignment):
    if device_assignment:
        raise ValueError(
            "replica_permutation comes with device_assignment=True, which"
            " fixes XLA's numbering of the replicas. Pass"
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
            f" logical CPUs, and TensorFlow runs already with {found}. Call it,"
            " with the largest number of replicas first, before anything makes"
            " a tensor, a variable or another strategy."
        )
