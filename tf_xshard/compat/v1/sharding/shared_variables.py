"""Lets shards assign variables made outside the computation.

On a TPU, each core reads the old value of a variable, such as a global step. It
assigns its own copy, so all copies get the same value. In one graph, the shards
would change one variable several times and read each other's values. Instead,
each `session.run` works as follows:

            +--copy--> the value before the step, which all shards read first
            |
variable ---+--------> assigned by shard 0, which then reads it
            |
            +--copy--> assigned by shard 1, which then reads and drops it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.private.tensorflow import v1 as tensorflow_v1

_FUNCTION_CALLS = (
    "If",
    "Case",
    "While",
    "PartitionedCall",
    "StatefulPartitionedCall",
)
_RESOURCE_READS = ("ResourceGather", "ResourceGatherNd")
_REF_WRITES = ("Assign", "Apply", "SparseApply", "Scatter", "CountUpTo")


def separate(
    variables: Sequence[tf.Variable],
    operations: Mapping[int, Sequence[tf.Operation]],
    start: tf.Operation,
) -> None:
    """Makes shards read old values, and assign each variable once."""
    for variable in variables:
        users = {
            shard: _users(variable, of_shard)
            for shard, of_shard in operations.items()
        }
        writers = {
            shard for shard, of in users.items() if any(map(_assigns, of))
        }
        # An optimizer updates weights in shard 0, after all shards read them.
        if not writers or (writers == {0} and variable.trainable):
            continue
        before = _Copy(variable, "before_the_step", start)
        for shard, of_shard in users.items():
            after = _after_an_assignment(of_shard, operations[shard])
            before.replace_in([one for one in of_shard if one not in after])
            if shard and after:
                own = _Copy(variable, f"of_shard_{shard}", start)
                own.replace_in([one for one in of_shard if one in after])


def refuse_assignments(
    graph: Any,
    operations: Sequence[tf.Operation],
    is_of_a_shard: Callable[[tf.Tensor], bool],
) -> None:
    """Raises ValueError if a `tf.function`'s shard assigns shared variables."""
    shared = {
        inside.ref(): outside
        for outside, inside in graph.captures
        if outside.dtype == tf.resource and not is_of_a_shard(outside)
    }
    for one in operations:
        if not _assigns(one) or one.type in _FUNCTION_CALLS:
            continue
        for tensor in one.inputs:
            if tensor.ref() in shared:
                raise ValueError(
                    "A variable that was made outside of the computation is"
                    f" assigned inside it ({one.name}), so it would change once"
                    " for each shard. Make the variable in the computation or,"
                    " in a tf.function, assign it after shard()."
                )


def _users(
    variable: tf.Variable, operations: Sequence[tf.Operation]
) -> list[tf.Operation]:
    tensors = {tensor.ref() for tensor in _tensors_of(variable)}
    return [
        one
        for one in operations
        if any(tensor.ref() in tensors for tensor in one.inputs)
    ]


def _after_an_assignment(
    users: Sequence[tf.Operation], operations: Sequence[tf.Operation]
) -> set[tf.Operation]:
    """Finds operations that assign a variable or run after an assignment."""
    found = {one for one in users if _assigns(one)}
    if found:
        for operation in operations:
            if any(
                parent in found
                for parent in (
                    *(tensor.op for tensor in operation.inputs),
                    *operation.control_inputs,
                )
            ):
                found.add(operation)
    return found


def _tensors_of(variable: tf.Variable) -> Iterator[tf.Tensor]:
    """Yields the tensors of a variable that operations take as an input."""
    if _is_resource(variable):
        yield variable.handle
    else:
        yield variable.op.outputs[0]
        yield tf.convert_to_tensor(variable)


def _is_resource(variable: tf.Variable) -> bool:
    return variable.op.outputs[0].dtype == tf.resource


def _assigns(operation: tf.Operation) -> bool:
    kind = operation.type
    if kind in _FUNCTION_CALLS:
        # A called function might assign; assume that it does.
        return True
    if kind.startswith("Assign") and kind.endswith("VariableOp"):
        return True
    if kind.startswith("Resource"):
        return kind not in _RESOURCE_READS
    return kind.startswith(_REF_WRITES)


class _Copy:
    """Copies a variable, in each run before any shard runs."""

    def __init__(
        self, variable: tf.Variable, suffix: str, start: tf.Operation
    ) -> None:
        name = f"{variable.op.name}/{suffix}"
        options = {
            "dtype": variable.dtype.base_dtype,
            "shape": variable.shape,
            "shared_name": start.graph.unique_name(name),
        }
        with (
            tf.control_dependencies(None),
            start.graph.colocate_with(variable.op, ignore_existing=True),
        ):
            if _is_resource(variable):
                copy = tf.raw_ops.VarHandleOp(**options)
                value = tf.raw_ops.ReadVariableOp(
                    resource=variable.handle, dtype=options["dtype"]
                )
                made = tf.raw_ops.AssignVariableOp(resource=copy, value=value)
                new = [copy]
            else:
                ref, _ = _tensors_of(variable)
                copy = tf.raw_ops.VariableV2(**options)
                made = tf.raw_ops.Assign(ref=copy, value=tf.identity(ref)).op
                with tf.control_dependencies([start]):
                    new = [copy, tf.identity(copy)]
        tensorflow_v1.run_before(made, start)
        self._pairs = list(zip(_tensors_of(variable), new, strict=True))

    def replace_in(self, operations: Sequence[tf.Operation]) -> None:
        """Makes operations use the copy instead of the variable."""
        for operation in operations:
            for old, new in self._pairs:
                tensorflow_v1.replace_input(operation, old, new)
