"""Private names of TensorFlow, Keras and jax that the tool needs.

The only module of `tf_xshard.testing` that touches them. The optimizers do not
import it: their own private names are in `tf_xshard/replica_context.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import keras
import tensorflow as tf
from jax._src import core as _jax_core
from jax._src.array import ArrayImpl
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

# TensorFlow's private names, each with the reason. Seen in 2.20 and 2.21.
# conformance/private_names_test.py fails with the name of one that moved.
TF_PRIVATE_NAMES = (
    # Turns what strategy.run() was given into a function that replicates it:
    # the one method that the simulated strategy overrides.
    (_tpu_strategy.TPUExtended, "_tpu_function_creator"),
    # Orders reads and writes of variables in a graph, as tf.function does.
    (_auto_control_deps, "AutomaticControlDependencies"),
    # Which variables an operation only reads, calls of functions included.
    (_auto_control_deps_utils, "get_read_write_resource_inputs"),
    # Make a function of a GraphDef known to the eager runtime, and unknown.
    (_eager_context.Context, "add_function_def"),
    (_eager_context.Context, "remove_function"),
    # Whether the runtime has started, after which devices are fixed. Asking
    # through the public API starts it.
    (_eager_context.context(), "_context_handle"),
    # dtype and shape of the variable behind a resource.
    (_handle_data_util, "get_resource_handle_data"),
    # A variable that no strategy's scope turns into a distributed one.
    (_resource_variables, "ResourceVariable"),
    # How dynamic shapes leave a TPU program: as the padded tensor.
    (_gen_xla_ops, "xla_remove_dynamic_dimension_size"),
)

# What `fit` calls before its first step, so that no step creates variables.
# Seen in Keras 3.12 to 3.15.
KERAS_PRIVATE_NAMES = ((keras.Model, "_symbolic_build"),)

dependencies.check_names(TF_PRIVATE_NAMES + KERAS_PRIVATE_NAMES)

# jax is pinned to one version (requirements.py), so its names need no check:
# the PJRT client for CPUs and the TPU compiler, the StableHLO dialect, and the
# array type that holds one buffer per device.
ShapedArray = _jax_core.ShapedArray
make_ir_context = _jax_mlir.make_ir_context

AutomaticControlDependencies = _auto_control_deps.AutomaticControlDependencies
ResourceVariable = _resource_variables.ResourceVariable
TPUExtended = _tpu_strategy.TPUExtended
remove_dynamic_dimension = _gen_xla_ops.xla_remove_dynamic_dimension_size

__all__ = (
    "ArrayImpl",
    "AutomaticControlDependencies",
    "ResourceVariable",
    "ShapedArray",
    "TPUExtended",
    "ir",
    "make_ir_context",
    "remove_dynamic_dimension",
    "stablehlo",
    "xla_client",
)


def is_initialized() -> bool:
    """Whether TensorFlow's runtime has started and its devices are fixed."""
    return _eager_context.context()._context_handle is not None


def register_functions(owner: object, definitions: Sequence) -> None:
    """Makes functions callable for as long as their owner lives.

    Args:
      owner: Whose graph calls them.
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
      handle: A tensor of dtype resource.

    Returns:
      Its `tf.TensorSpec`, None if it is no variable's.
    """
    data = _handle_data_util.get_resource_handle_data(handle)
    if not data.is_set or len(data.shape_and_type) != 1:
        return None
    (variable,) = data.shape_and_type
    return tf.TensorSpec(tf.TensorShape(variable.shape), variable.dtype)


def written_resources(operation: tf.Operation) -> list[tf.Tensor]:
    """The resources among an operation's inputs that it may write."""
    _, written = _auto_control_deps_utils.get_read_write_resource_inputs(
        operation
    )
    return list(written)


def build_keras_model(model: keras.Model, batch: tuple) -> None:
    """Creates a model's, its optimizer's and its metrics' variables.

    Args:
      model: A compiled model.
      batch: A batch, as `train_on_batch` takes it.
    """
    model._symbolic_build(data_batch=batch)
