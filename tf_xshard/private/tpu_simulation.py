"""Private names of TensorFlow, Keras and jax that `tf_xshard.testing` needs.

The optimizers do not import this module: it needs jax.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import keras
import numpy as np
import tensorflow as tf
from jax._src import core as _jax_core
from jax._src.array import ArrayImpl as _ArrayImpl
from jax._src.interpreters import mlir as _jax_mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo as stablehlo
from tensorflow.compiler.tf2xla.ops import gen_xla_ops as _gen_xla_ops
from tensorflow.python.distribute import tpu_strategy as _tpu_strategy
from tensorflow.python.eager import context as _eager_context
from tensorflow.python.framework import auto_control_deps as _auto_control_deps
from tensorflow.python.framework import (
    auto_control_deps_utils as _auto_control_deps_utils,
)
from tensorflow.python.ops import handle_data_util as _handle_data_util
from tensorflow.python.ops import resource_variable_ops as _resource_variables

from tf_xshard import dependencies
from tf_xshard.private import tpu_iterators

# TensorFlow's private names, each with the reason. Seen in 2.20 and 2.21.
# conformance/private_names_test.py fails with the name of one that moved.
TF_PRIVATE_NAMES = (
    # Turns the function given to strategy.run() into one that replicates it:
    # what SimulatedTPUExtended is for.
    (_tpu_strategy.TPUExtended, "_tpu_function_creator"),
    # Distribute the user's datasets.
    (_tpu_strategy.TPUExtended, "_experimental_distribute_dataset"),
    (_tpu_strategy.TPUExtended, "_distribute_datasets_from_function"),
    # Orders reads and writes of variables in a graph, as tf.function does.
    (_auto_control_deps, "AutomaticControlDependencies"),
    # Which variables an operation only reads, calls of functions included.
    (_auto_control_deps_utils, "get_read_write_resource_inputs"),
    # Register a GraphDef's function with the eager runtime, and remove it.
    (_eager_context.Context, "add_function_def"),
    (_eager_context.Context, "remove_function"),
    # Whether the runtime has started, after which devices are fixed. Asking
    # through the public API starts it.
    (_eager_context.context(), "_context_handle"),
    # dtype and shape of the variable behind a resource.
    (_handle_data_util, "get_resource_handle_data"),
    # A variable that no strategy's scope turns into a distributed one.
    (_resource_variables, "ResourceVariable"),
    # A TPU program returns a tensor of dynamic shape as the padded tensor.
    (_gen_xla_ops, "xla_remove_dynamic_dimension_size"),
)

# Attributes that TPUExtended gives its instances. Seen in 2.20 and 2.21;
# creating a SimulatedTPUExtended fails with the name of one that moved.
TF_PRIVATE_ATTRIBUTES = (
    # The device of each replica, [num_replicas, cores_per_replica]. Without a
    # device assignment TPUExtended takes the names of TPU devices.
    "_tpu_devices",
    # The host, and the hosts of all cores for the input pipelines. TPUExtended
    # assumes that CPU:0 is the host of every core.
    "_host_device",
    "_device_input_worker_devices",
    "_host_input_worker_devices",
    # One tf.function for each function given to an eager strategy.run().
    "_tpu_function_cache",
)

# Attributes of nodes in the graph of a replicated function. Seen in 2.20 and
# 2.21. TPUExtended marks every operation of the replicas' program with one.
REPLICATED = "_tpu_replicate"
# Operations that the host of the TPU executes, from inside the program.
OUTSIDE_COMPILATION = (
    "_xla_outside_compilation",
    "_xla_map_outside_compilation",
)
# These place a node on a TPU or describe it to TPUExtended's compiler passes.
PLACEMENT = (
    REPLICATED,
    "_class",
    "_pivot_for_cluster",
    "_tpu_input_identity",
    "_xla_inferred_shapes",
)

# What `fit` calls before its first step, so that no step creates variables.
# Seen in Keras 3.12 to 3.15.
KERAS_PRIVATE_NAMES = ((keras.Model, "_symbolic_build"),)

dependencies.check_names(TF_PRIVATE_NAMES + KERAS_PRIVATE_NAMES)

# jax is pinned to one version (requirements.py), so its names need no check:
# the PJRT client for CPUs and the TPU compiler, the StableHLO dialect, and the
# array type that holds one buffer per device.
make_ir_context = _jax_mlir.make_ir_context

AutomaticControlDependencies = _auto_control_deps.AutomaticControlDependencies
ResourceVariable = _resource_variables.ResourceVariable
remove_dynamic_dimension = _gen_xla_ops.xla_remove_dynamic_dimension_size

__all__ = (
    "AutomaticControlDependencies",
    "ResourceVariable",
    "ir",
    "make_ir_context",
    "remove_dynamic_dimension",
    "stablehlo",
    "xla_client",
)


class SimulatedTPUExtended(_tpu_strategy.TPUExtended):
    """TPUStrategy's own implementation, except for what executes a program.

    Args:
      strategy: The strategy that it implements.
      resolver: The cluster resolver that has the TPU system's metadata.
      device_assignment: A `tf.tpu.experimental.DeviceAssignment`, or None.
      devices: Without a device assignment, the device of each replica.
      host_of: A function from the name of a replica's device to its host's.
      execute: A function that `strategy.run()` calls while a graph is traced.
        It gets a function without arguments that replicates, in the current
        graph, what `run()` was given, and returns its results. What it returns
        itself, `run()` returns.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        resolver: tf.distribute.cluster_resolver.ClusterResolver,
        device_assignment: tf.tpu.experimental.DeviceAssignment | None,
        devices: Sequence[str],
        host_of: Callable[[str], str],
        execute: Callable[[Callable[[], Any]], Any],
    ) -> None:
        super().__init__(
            strategy, resolver, device_assignment=device_assignment
        )
        dependencies.check_names(
            tuple((self, name) for name in TF_PRIVATE_ATTRIBUTES)
        )
        self._execute = execute
        if device_assignment is None:
            self._tpu_devices = np.array(
                [[device] for device in devices], dtype=object
            )
        hosts: dict[str, list[str]] = collections.OrderedDict()
        for device in self._tpu_devices[:, 0]:
            hosts.setdefault(host_of(device), []).append(device)
        self._host_device = next(iter(hosts))
        self._device_input_worker_devices = hosts
        self._host_input_worker_devices = collections.OrderedDict(
            (host, [host] * len(devices)) for host, devices in hosts.items()
        )

    def _experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions
    ) -> Any:
        return super()._experimental_distribute_dataset(
            tpu_iterators.untuned(dataset), options
        )

    def _distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[Any], tf.data.Dataset],
        options: tf.distribute.InputOptions,
    ) -> Any:
        return super()._distribute_datasets_from_function(
            lambda context: tpu_iterators.untuned(dataset_fn(context)), options
        )

    def _tpu_function_creator(
        self, fn: Hashable, options: tf.distribute.RunOptions
    ) -> Callable[[tuple, dict], Any]:
        creator = super()._tpu_function_creator

        def run(args, kwargs):
            return self._execute(lambda: creator(fn, options)(args, kwargs))

        if not tf.executing_eagerly():
            return run
        # As TPUExtended does: one tf.function for each function.
        if fn not in self._tpu_function_cache:
            self._tpu_function_cache[fn] = tf.function(run, autograph=False)
        return self._tpu_function_cache[fn]


def disable_packed_variables(strategy: tf.distribute.TPUStrategy) -> None:
    """Lets a graph capture every copy of a variable, not one packed handle."""
    # Read by tf.distribute where a variable is created. TPUStrategy's own
    # __init__ sets it to True; False is what a strategy without it has.
    strategy._enable_packed_variable_in_eager_mode = False


def is_initialized() -> bool:
    """Whether TensorFlow's runtime has started and its devices are fixed."""
    return _eager_context.context()._context_handle is not None


def register_functions(owner: object, definitions: Iterable[Any]) -> None:
    """Makes functions callable for as long as their owner lives.

    Args:
      owner: What calls them.
      definitions: Their FunctionDefs.
    """
    context = _eager_context.context()
    for definition in definitions:
        context.add_function_def(definition)
        weakref.finalize(
            owner, context.remove_function, definition.signature.name
        ).atexit = False


def variable_spec(handle: tf.Tensor) -> tf.TensorSpec | None:
    """Shape and dtype of the variable behind a resource.

    Args:
      handle: A scalar tensor of dtype resource.

    Returns:
      The variable's `tf.TensorSpec`, None if the resource is not a variable.
    """
    data = _handle_data_util.get_resource_handle_data(handle)
    if not data.is_set or len(data.shape_and_type) != 1:
        return None
    (variable,) = data.shape_and_type
    return tf.TensorSpec(tf.TensorShape(variable.shape), variable.dtype)


def written_resources(operation: tf.Operation) -> list[tf.Tensor]:
    """The inputs (scalars of dtype resource) that an operation may write."""
    _, written = _auto_control_deps_utils.get_read_write_resource_inputs(
        operation
    )
    return list(written)


def build_keras_model(model: keras.Model, batch: tuple) -> None:
    """Creates the variables of a model, its optimizer and its metrics.

    Args:
      model: A compiled model.
      batch: A batch, as `train_on_batch` takes it: structures of arrays
        [batch_size, ...].
    """
    model._symbolic_build(data_batch=batch)


def jax_array(
    values: Sequence[np.ndarray],
    buffers: Sequence[jax.Array],
    sharding: jax.sharding.Sharding,
) -> jax.Array:
    """A jax array whose buffers may differ, which jax does not look at.

    Args:
      values: For each device, an array of one shape and dtype.
      buffers: The same arrays, on their devices.
      sharding: A replicated sharding over the devices.

    Returns:
      The array, of the shape of one value.
    """
    return _ArrayImpl(
        _jax_core.ShapedArray(values[0].shape, values[0].dtype),
        sharding,
        buffers,
        committed=True,
        _skip_checks=True,
    )
