"""Raises for operations and resources that the simulated TPU lacks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tensorflow as tf

from tf_xshard.private.jax import tpu_simulation

_EMBEDDING_CORES = "TPU embedding (its embedding cores)"
_UNSUPPORTED = {
    "EagerPyFunc": "tf.py_function",
    "InfeedDequeue": "infeed",
    "InfeedDequeueTuple": "infeed",
    "OutfeedEnqueue": "outfeed",
    "OutfeedEnqueueTuple": "outfeed",
    "PrintV2": "tf.print",
    "PyFunc": "tf.numpy_function",
    "PyFuncStateless": "tf.numpy_function",
    "RecvTPUEmbeddingActivations": _EMBEDDING_CORES,
    "SendTPUEmbeddingGradients": _EMBEDDING_CORES,
    "StringFormat": "tf.strings.format (tf.print)",
    "TPUEmbeddingActivations": _EMBEDDING_CORES,
    "TPUPartitionedInput": "model parallelism (several cores per replica)",
    "TPUPartitionedInputV2": "model parallelism (several cores per replica)",
    "XlaRecvTPUEmbeddingActivations": _EMBEDDING_CORES,
    "XlaSendTPUEmbeddingGradients": _EMBEDDING_CORES,
}


def variable_spec(resource: tf.Tensor) -> tf.TensorSpec:
    """Returns the shape and dtype of the variable behind a resource."""
    source = resource
    if resource.op.type == "TPUReplicatedInput":
        source = resource.op.inputs[0]
    spec = tpu_simulation.variable_spec(source)
    if spec is None:
        raise NotImplementedError(
            "The step uses a resource that is not a variable"
            f" ({resource.name!r}), such as a table or an iterator. A TPU can't"
            " hold it. Move it out of the function given to strategy.run()."
        )
    if resource.op.type != "TPUReplicatedInput":
        raise NotImplementedError(
            f"The step uses a variable of shape {spec.shape} and dtype"
            f" {spec.dtype.name} that was created outside strategy.scope(), or"
            f" in another strategy's scope ({resource.name!r}). TPU cores can't"
            " access it. Create it inside the scope."
        )
    if not spec.shape.is_fully_defined():
        raise NotImplementedError(
            f"The step uses a variable of unknown shape {spec.shape}"
            f" ({resource.name!r}). XLA needs the shape: create the variable"
            " with a shape that is fully defined."
        )
    return spec


def check_operations(inside: Sequence[tf.Operation], graph: tf.Graph) -> None:
    """Checks that XLA:CPU can execute the operations of a program."""
    library = graph.as_graph_def().library.function
    nodes = itertools.chain(
        (o.node_def for o in inside), *(f.node_def for f in library)
    )
    for node in nodes:
        construct = _UNSUPPORTED.get(node.op)
        if any(
            name in node.attr for name in tpu_simulation.OUTSIDE_COMPILATION
        ):
            construct = "outside compilation"
        if construct is not None:
            raise NotImplementedError(
                f"The step contains {construct} ({node.op} {node.name!r}). On a"
                " TPU, its host or cores of another kind execute it; the"
                " simulated TPU (XLA:CPU) has neither. Move it out of the"
                " function given to strategy.run()."
            )
