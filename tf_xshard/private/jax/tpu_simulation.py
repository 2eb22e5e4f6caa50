"""Uses private names of TensorFlow, Keras and jax for `tf_xshard.testing`.

The optimizers do not import this module, since it needs jax.
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

from tf_xshard import dependencies
from tf_xshard.private import names
from tf_xshard.private.tensorflow import iterators as tpu_iterators

_FEATURE = "tf_xshard.testing"
_PYTHON = "tensorflow.python."
_EXTENDED = _PYTHON + "distribute.tpu_strategy.TPUExtended"
_CONTEXT = _PYTHON + "eager.context.Context."
# Present in TensorFlow 2.20 to 2.22.
_TENSORFLOW = names.PrivateNames(
    _FEATURE,
    {
        "Extended": _EXTENDED,
        # Turns the function given to strategy.run() into a function that
        # replicates it. SimulatedTPUExtended exists to override this method.
        "create_function": _EXTENDED + "._tpu_function_creator",
        # These methods distribute the user's datasets.
        "distribute": _EXTENDED + "._experimental_distribute_dataset",
        "distribute_from": _EXTENDED + "._distribute_datasets_from_function",
        # Orders reads and writes of variables in a graph, as tf.function does.
        "AutomaticControlDependencies": (
            _PYTHON + "framework.auto_control_deps.AutomaticControlDependencies"
        ),
        # Says which variables an operation only reads, including operations
        # that call functions.
        "read_write": (
            _PYTHON + "framework.auto_control_deps_utils"
            ".get_read_write_resource_inputs"
        ),
        "context": _PYTHON + "eager.context.context",
        # These methods add a GraphDef's function to the eager runtime, and
        # remove it.
        "add_function": _CONTEXT + "add_function_def",
        "remove_function": _CONTEXT + "remove_function",
        # Returns the dtype and shape of the variable behind a resource.
        "handle_data": (
            _PYTHON + "ops.handle_data_util.get_resource_handle_data"
        ),
        # A variable that no strategy's scope makes a distributed variable.
        "ResourceVariable": (
            _PYTHON + "ops.resource_variable_ops.ResourceVariable"
        ),
        # Makes a tensor of dynamic shape the padded tensor that a TPU program
        # returns.
        "remove_dynamic_dimension": (
            "tensorflow.compiler.tf2xla.ops.gen_xla_ops"
            ".xla_remove_dynamic_dimension_size"
        ),
    },
)
# An attribute of the runtime's context, present in 2.20 to 2.22. It is None
# until the runtime starts, which fixes the devices. A question through the
# public API would start the runtime.
_HANDLE = "_context_handle"

# Attributes that TPUExtended gives its instances. Present in 2.20 to 2.22. If
# an attribute has moved, creating a SimulatedTPUExtended fails with its name.
TF_PRIVATE_ATTRIBUTES = names.attributes(
    "tf_xshard.testing.simulated_tpu_strategy()",
    # The device of each replica, [num_replicas, cores_per_replica]. Without a
    # device assignment, TPUExtended takes the names of TPU devices.
    "_tpu_devices",
    # The host, and the hosts of all cores for the input pipelines. TPUExtended
    # assumes that CPU:0 is the host of every core.
    "_host_device",
    "_device_input_worker_devices",
    "_host_input_worker_devices",
    # One tf.function for each function given to an eager strategy.run().
    "_tpu_function_cache",
)
# An attribute of TPUStrategy. If it is True, eager code packs the copies of a
# variable, which needs the TPU's host.
names.attributes(
    "tf_xshard.testing.simulated_tpu_strategy()",
    "_enable_packed_variable_in_eager_mode",
)

# Attributes of nodes in the graph of a replicated function. Present in 2.20 to
# 2.22. TPUExtended marks every operation of the replicas' program with this:
REPLICATED = "_tpu_replicate"
# These mark operations of the program that the host of the TPU executes.
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

# `fit` calls it before its first step, so that no step creates variables.
# Present in Keras 3.12 to 3.16.
_KERAS = names.PrivateNames(
    _FEATURE, {"symbolic_build": "keras.Model._symbolic_build"}
)
# Present in jax 0.10 to 0.12.
_JAX = names.PrivateNames(
    _FEATURE,
    {
        # The StableHLO dialect and its parser.
        "make_ir_context": "jax._src.interpreters.mlir.make_ir_context",
        "ir": "jax._src.lib.mlir.ir",
        "stablehlo": "jax._src.lib.mlir.dialects.hlo",
        # The PJRT client for CPUs, and the TPU compiler.
        "xla_client": "jax._src.lib.xla_client",
        "make_cpu_client": "jax._src.lib.xla_client.make_cpu_client",
        # An array that holds one buffer for each device.
        "ArrayImpl": "jax._src.array.ArrayImpl",
        "ShapedArray": "jax._src.core.ShapedArray",
    },
)
for _names in (_TENSORFLOW, _KERAS, _JAX):
    _names.check()

make_ir_context = _JAX.make_ir_context
ir = _JAX.ir
stablehlo = _JAX.stablehlo
xla_client = _JAX.xla_client
AutomaticControlDependencies = _TENSORFLOW.AutomaticControlDependencies
ResourceVariable = _TENSORFLOW.ResourceVariable
remove_dynamic_dimension = _TENSORFLOW.remove_dynamic_dimension

__all__ = (
    "AutomaticControlDependencies",
    "ResourceVariable",
    "ir",
    "make_ir_context",
    "remove_dynamic_dimension",
    "stablehlo",
    "xla_client",
)


_Extended: Any = _TENSORFLOW.Extended


class SimulatedTPUExtended(_Extended):
    """Implements TPUStrategy, except for the execution of a program."""

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
        missing = [
            one for one in TF_PRIVATE_ATTRIBUTES if not hasattr(self, one)
        ]
        dependencies.refuse_moved(_FEATURE, missing)
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
        return tpu_iterators.end_with_process(
            super()._experimental_distribute_dataset(
                tpu_iterators.untuned(dataset), options
            )
        )

    def _distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[Any], tf.data.Dataset],
        options: tf.distribute.InputOptions,
    ) -> Any:
        return tpu_iterators.end_with_process(
            super()._distribute_datasets_from_function(
                lambda context: tpu_iterators.untuned(dataset_fn(context)),
                options,
            )
        )

    def _tpu_function_creator(
        self, fn: Hashable, options: tf.distribute.RunOptions
    ) -> Callable[[tuple, dict], Any]:
        creator = super()._tpu_function_creator

        def run(args, kwargs):
            return self._execute(lambda: creator(fn, options)(args, kwargs))

        if not tf.executing_eagerly():
            return run
        # Like TPUExtended, make one tf.function for each function.
        if fn not in self._tpu_function_cache:
            self._tpu_function_cache[fn] = tf.function(run, autograph=False)
        return self._tpu_function_cache[fn]


def disable_packed_variables(strategy: tf.distribute.TPUStrategy) -> None:
    """Lets a graph capture every copy of a variable, not one packed handle."""
    # tf.distribute reads it where a variable is created. TPUStrategy's __init__
    # sets it to True. A strategy without the attribute counts as False.
    strategy._enable_packed_variable_in_eager_mode = False


def is_initialized() -> bool:
    """Returns True if TensorFlow's runtime has started, with fixed devices."""
    return getattr(_TENSORFLOW.context(), _HANDLE) is not None


def register_functions(owner: object, definitions: Iterable[Any]) -> None:
    """Makes functions callable for as long as their owner lives."""
    context = _TENSORFLOW.context()
    for definition in definitions:
        _TENSORFLOW.add_function(context, definition)
        weakref.finalize(
            owner,
            _TENSORFLOW.remove_function,
            context,
            definition.signature.name,
        ).atexit = False


def variable_spec(handle: tf.Tensor) -> tf.TensorSpec | None:
    """Returns the shape and dtype of the variable behind a resource."""
    data = _TENSORFLOW.handle_data(handle)
    if not data.is_set or len(data.shape_and_type) != 1:
        return None
    (variable,) = data.shape_and_type
    return tf.TensorSpec(tf.TensorShape(variable.shape), variable.dtype)


def written_resources(operation: tf.Operation) -> list[tf.Tensor]:
    """Returns the resources among an operation's inputs that it may write."""
    _, written = _TENSORFLOW.read_write(operation)
    return list(written)


def build_keras_model(model: keras.Model, batch: tuple) -> None:
    """Creates the variables of a model, its optimizer and its metrics."""
    model._symbolic_build(data_batch=batch)


def jax_array(
    values: Sequence[np.ndarray],
    buffers: Sequence[jax.Array],
    sharding: jax.sharding.Sharding,
) -> jax.Array:
    """Makes a jax array whose buffers may differ, which jax does not check."""
    return _JAX.ArrayImpl(
        _JAX.ShapedArray(values[0].shape, values[0].dtype),
        sharding,
        buffers,
        committed=True,
        _skip_checks=True,
    )
