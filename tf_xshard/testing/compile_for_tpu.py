"""Compiles a TPUStrategy step with the TPU compiler, without a TPU."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard.private.jax import tpu_simulation
from tf_xshard.testing import compiled
from tf_xshard.testing import execution
from tf_xshard.testing import requirements
from tf_xshard.testing import simulated_strategy
from tf_xshard.testing import stablehlo

# Describes the machine to libtpu, which would otherwise ask a metadata server.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # libtpu's lock file lets only one process at a time hold a TPU. Any number
    # of processes may compile.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_STEPS = ("train", "test", "predict")


def compile_for_tpu(
    fn_or_model: Callable[..., Any] | keras.Model,
    *args: Any,
    topology: str = "v5e:2x4",
    step: str = "train",
) -> compiled.CompiledForTPU:
    """Compiles a step of TPUStrategy with the real TPU compiler, without a TPU.

    As for `simulated_tpu_strategy`, TPUStrategy traces the program, and
    TensorFlow lowers it. Then libtpu's compiler compiles it for TPU cores. The
    result shows what a step communicates, how much memory it needs, and whether
    it compiles at all. Nothing is executed, and no variable changes.

    Args:
      fn_or_model: A function that calls `strategy.run()` once (a `tf.function`
        or not), or a compiled Keras model. `simulated_tpu_strategy` must have
        created the strategy.
      *args: A function's arguments. For a model, one global batch as
        `train_on_batch` takes it, x and, if the step uses them, y and sample
        weights. Each is a nested structure of arrays [batch_size, ...], where
        batch_size is a multiple of the number of replicas.
      topology: The TPUs, as "<generation>:<chips>x<chips>[x<chips>]". Chips of
        v5e, v6e ("v5e:2x4") and v5p ("v5p:2x2x2") have one core; chips of v4
        and tpu7x ("v4:2x2x1", "tpu7x:2x2x1") have two. The number of cores must
        equal the number of replicas. Up to 256 are tested. Default: "v5e:2x4".
      step: A model's step, "train" (default), "test" (`evaluate`) or "predict".

    Returns:
      A `CompiledForTPU` with the optimized HLO, its collectives, memory
      statistics and flops. `print` it for a report.

    Raises:
      ImportError: If libtpu is missing or is not the tested version.
      TypeError: If the first argument is neither a function nor a model, or is
        a ConcreteFunction, or if topology is not a str.
      ValueError: If the function does not call `strategy.run()` exactly once
        under a simulated strategy, or a shape or `step` is unknown. If the
        model is not compiled or has another strategy, or if the batch is
        missing or can't be split evenly. If the topology is unknown, or if its
        number of cores is not the number of replicas.
      NotImplementedError: If the step can't be compiled. The message names the
        construct.
      jax.errors.JaxRuntimeError: If the TPU compiler rejects the program, for
        example because the program needs more memory than a core has.

    Example:

    >>> import keras, numpy as np
    >>> from tf_xshard import testing
    >>> strategy = testing.simulated_tpu_strategy(8)
    >>> with strategy.scope():
    ...     model = keras.Sequential(
    ...         [keras.layers.Input((4,)), keras.layers.Dense(1)]
    ...     )
    ...     model.compile(optimizer="adam", loss="mse")
    >>> batch = np.zeros([16, 4], "float32"), np.zeros([16, 1], "float32")
    >>> compiled = testing.compile_for_tpu(model, *batch, topology="v5e:2x4")
    >>> sorted({collective.kind for collective in compiled.collectives})
    ['all-reduce', 'all-to-all']

    Source: `jax.experimental.topologies`, which describes TPUs to the same
    compiler ahead of time.
    """
    requirements.check_libtpu()
    if not isinstance(topology, str):
        raise TypeError(f"topology must be a str, got {topology!r}.")
    signature = None
    if isinstance(fn_or_model, keras.Model):
        function = _step_of(fn_or_model, args, step)
        args = ()
    elif isinstance(fn_or_model, tf.types.experimental.ConcreteFunction):
        raise TypeError(
            "compile_for_tpu got a ConcreteFunction, which is already traced."
            " Pass the tf.function, or the Python function."
        )
    elif callable(fn_or_model):
        function = getattr(fn_or_model, "python_function", fn_or_model)
        signature = getattr(fn_or_model, "input_signature", None)
    else:
        raise TypeError(
            "compile_for_tpu takes a function or a Keras model, got"
            f" {type(fn_or_model).__name__}."
        )
    # Capture every simulated strategy, since a function does not say whose
    # run() it calls.
    with execution.capture(None) as programs:
        tf.function(function, input_signature=signature).get_concrete_function(
            *args
        )
    if len(programs) != 1:
        raise ValueError(
            f"The function called strategy.run() {len(programs)} times under a"
            " strategy of simulated_tpu_strategy(). It must call it exactly"
            " once. Pass compile_for_tpu the function that calls"
            " strategy.run(), not the function that is passed to"
            " strategy.run()."
        )
    (extraction,) = programs
    program = extraction.program
    shapes = tuple(tensors[0].shape for tensors in extraction.arguments)
    for shape in shapes:
        if not shape.is_fully_defined():
            raise ValueError(
                f"An argument of strategy.run() has the unknown shape {shape}."
                " A TPU program is compiled for one shape: batch with"
                " drop_remainder=True, or give all replicas arrays of the same"
                " shape."
            )
    devices = _devices(topology, program.num_replicas)
    lowered = stablehlo.lower(program, tuple(tuple(s) for s in shapes))
    return _compile(lowered.text, devices, topology)


def _step_of(model: keras.Model, batch: Any, step: str) -> Callable[[], Any]:
    """Returns a function that calls `strategy.run()` with a model's step."""
    if step not in _STEPS:
        raise ValueError(f"step must be one of {_STEPS}, got {step!r}.")
    strategy = model.distribute_strategy
    if not isinstance(strategy, simulated_strategy.SimulatedTPUStrategy):
        raise ValueError(
            f"The model was created under {type(strategy).__name__}. Create it"
            " in the scope of a strategy from simulated_tpu_strategy()."
        )
    if not model.compiled and step != "predict":
        raise ValueError(
            f"The model is not compiled, which its {step} step needs: call"
            " model.compile() first."
        )
    if not batch:
        raise ValueError("compile_for_tpu(model, x, y): the batch is missing.")
    num_replicas = strategy.num_replicas_in_sync
    batch = tf.nest.map_structure(np.asarray, batch)
    shapes = [array.shape for array in tf.nest.flatten(batch)]
    lengths = {shape[0] if shape else 0 for shape in shapes}
    if len(lengths) > 1 or 0 in lengths or max(lengths) % num_replicas:
        raise ValueError(
            f"The arrays of the batch have the shapes {shapes}. All must have"
            " the same first dimension, a positive multiple of"
            f" {num_replicas}, the number of replicas. (A list counts as a"
            " structure of arrays: pass NumPy arrays.)"
        )

    def shard(replica_id):
        def rows(array):
            count = len(array) // num_replicas
            return array[count * replica_id : count * (replica_id + 1)]

        return tf.nest.map_structure(rows, batch)

    if model.compiled:
        with strategy.scope():
            tpu_simulation.build_keras_model(model, shard(0))
    data = strategy.experimental_distribute_values_from_function(
        lambda context: tf.nest.map_structure(
            tf.constant, shard(context.replica_id_in_sync_group)
        )
    )
    run = {
        "train": model.train_step,
        "test": model.test_step,
        "predict": model.predict_step,
    }[step]
    return lambda: strategy.run(run, args=(data,))


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    added = [name for name in _ENVIRONMENT if name not in os.environ]
    os.environ.update({name: _ENVIRONMENT[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@functools.cache
def _all_devices(topology: str) -> tuple:
    # jax.experimental.topologies is public, and initializes no jax backend.
    from jax.experimental import topologies

    with _environment():
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=topology
        )
    return tuple(description.devices)


def _devices(topology: str, num_replicas: int) -> tuple:
    try:
        # The compiler reads an empty name as some default topology.
        devices = _all_devices(topology or "(empty)")
    except RuntimeError as error:
        raise ValueError(
            f"The TPU compiler does not know the topology {topology!r}:"
            f" {error}. Examples: v4:2x2x1, v5e:2x4, v5p:2x2x2, v6e:2x4 and"
            " tpu7x:2x2x1 have 8 cores, v5e:16x16 has 256."
        ) from error
    if len(devices) != num_replicas:
        raise ValueError(
            f"Topology {topology} has {len(devices)} cores, but the program has"
            f" {num_replicas} replicas. Use simulated_tpu_strategy("
            f"{len(devices)}), or a topology of {num_replicas} cores."
        )
    return devices


def _compile(
    text: str, devices: tuple, topology: str
) -> compiled.CompiledForTPU:
    xla_client = tpu_simulation.xla_client
    options = xla_client.CompileOptions()
    options.num_replicas = len(devices)
    options.num_partitions = 1
    options.device_assignment = xla_client.DeviceAssignment.create(
        np.array([[device.id] for device in devices], np.int32)
    )
    start = time.perf_counter()
    with tpu_simulation.make_ir_context():
        executable = devices[0].client.compile(
            tpu_simulation.ir.Module.parse(text),
            xla_client.DeviceList(devices),
            options,
        )
    seconds = time.perf_counter() - start
    (module,) = executable.hlo_modules()
    hlo_text = module.to_string()
    memory = executable.get_compiled_memory_stats()
    flops = executable.cost_analysis().get("flops")
    return compiled.CompiledForTPU(
        topology=topology,
        device_kind=devices[0].device_kind,
        num_replicas=len(devices),
        hlo_text=hlo_text,
        stablehlo_text=text,
        collectives=compiled.collectives(hlo_text),
        memory=compiled.MemoryStatistics(
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            code_bytes=memory.generated_code_size_in_bytes,
        ),
        # The flops are missing if nothing is computed, negative if unknown.
        flops=flops if flops is not None and flops >= 0 else None,
        compile_seconds=seconds,
    )
