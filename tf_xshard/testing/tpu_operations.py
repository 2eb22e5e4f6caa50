"""Replaces operations that only a TPU has by XLA's operations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_xshard.private.jax import tpu_simulation

# Maps TPU operations to the custom calls that stand for them, and which
# stablehlo.py replaces by StableHLO's operations.
CUSTOM_CALLS = {
    "AllToAll": "tf_xshard.all_to_all",
    "CollectivePermute": "tf_xshard.collective_permute",
}


def rewrite(
    nodes: Sequence[tf.compat.v1.NodeDef],
    renamed: dict[str, str],
    in_function: Any = None,
) -> None:
    """Replaces TPU operations by XLA operations, in place."""
    by_name = {node.name: node for node in nodes}
    replaced = set()
    for node in nodes:
        if node.op == "CrossReplicaSum":
            # XlaAllReduce takes the same inputs, and emits the same HLO as the
            # TPU's kernel.
            node.op = "XlaAllReduce"
            node.attr["reduce_op"].s = b"Add"
            node.attr["mode"].s = b"CrossReplica"
        elif node.op in CUSTOM_CALLS:
            _make_custom_call(node, by_name)
            replaced.add(node.name)
        for attribute in tpu_simulation.PLACEMENT:
            node.attr.pop(attribute, None)
        node.device = ""
        node.op = renamed.get(node.op, node.op)
        for value in node.attr.values():
            for function in (value.func, *value.list.func):
                if function.name in renamed:
                    function.name = renamed[function.name]
    if in_function is None:
        return
    # Inside a function, an input names its producer's output argument.
    for node in nodes:
        for index, name in enumerate(node.input):
            node.input[index] = _output_of_custom_call(name, replaced)
    for key, name in in_function.ret.items():
        in_function.ret[key] = _output_of_custom_call(name, replaced)


def _output_of_custom_call(name: str, replaced: set[str]) -> str:
    if name.split(":")[0] in replaced:
        return name.replace(":output:", ":results:")
    return name


def _make_custom_call(
    node: tf.compat.v1.NodeDef, by_name: dict[str, tf.compat.v1.NodeDef]
) -> None:
    target = CUSTOM_CALLS[node.op]
    config = {"replicas": _constant(node.input[1], by_name).tolist()}
    if node.op == "AllToAll":
        for key in ("split_dimension", "concat_dimension", "split_count"):
            config[key] = node.attr[key].i
    dtype = node.attr["T"].type
    (shape,) = node.attr["_output_shapes"].list.shape
    if not tf.TensorShape(shape).is_fully_defined():
        raise NotImplementedError(
            f"{node.op} {node.name!r} has the unknown shape"
            f" {tf.TensorShape(shape)}. It needs a shape that is fully defined:"
            " batch with drop_remainder=True, or set the tensor's shape."
        )
    control = [name for name in node.input if name.startswith("^")]
    operand = node.input[0]
    del node.input[:]
    node.input.extend([operand, *control])
    node.op = "XlaCustomCallV2"
    node.attr.clear()
    node.attr["call_target_name"].s = target.encode()
    node.attr["backend_config"].s = json.dumps(config).encode()
    node.attr["has_side_effect"].b = False
    for key in ("operand_dtypes", "result_dtypes"):
        node.attr[key].list.type.append(dtype)
    node.attr["result_shapes"].CopyFrom(
        tf.compat.v1.AttrValue(
            list=tf.compat.v1.AttrValue.ListValue(shape=[shape])
        )
    )


def _constant(
    name: str, by_name: dict[str, tf.compat.v1.NodeDef]
) -> np.ndarray:
    """Returns the value of a constant tensor, of the same shape."""
    node = by_name.get(name.split(":")[0])
    while node is not None and node.op == "Identity":
        node = by_name.get(node.input[0].split(":")[0])
    if node is None or node.op != "Const":
        raise NotImplementedError(
            f"A collective's group assignment ({name!r}) is not a constant"
            " where it is used. Make it a Python list."
        )
    return tf.make_ndarray(node.attr["value"].tensor)
