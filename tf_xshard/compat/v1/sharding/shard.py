"""Defines `shard`, which builds a computation's shards into one graph.

inputs --split--> shard 0 -- gradients --+               +-- shard 0 --+
                  shard 1 -- gradients --+-- group sum --+-- shard 1 --+--
                  ...                    |   (add_n)     |   ...       |
                                         +---------------+            joined
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard import checks
from tf_xshard.compat.v1.sharding import cross_replica_sum
from tf_xshard.compat.v1.sharding import traced_shards
from tf_xshard.private.tensorflow import autograph


def shard_initializer() -> tf.Operation:
    """Makes an operation that copies shard 0's values to the other shards.

    When a session first runs the shards, copies without a value take shard 0's
    values automatically. Run this operation only after a later change to shard
    0's variables, such as a `Saver.restore` in the middle of training.

    Returns:
      An operation in the current graph.

    Example:

    >>> with tf.Graph().as_default():
    ...     op = tf_xshard.compat.v1.shard_initializer()
    >>> op.type
    'NoOp'
    """
    return tf.group(
        *[
            variable.initializer
            for variable in tf.compat.v1.get_collection(
                traced_shards.SHARD_VARIABLES
            )
        ]
    )


@autograph.entry_point
def shard(
    computation: Callable[..., Any],
    inputs: list[Any] | None = None,
    num_shards: int = 1,
    input_shard_axes: Sequence[int] | None = None,
    outputs_from_all_shards: bool | Sequence[bool] = True,
    output_shard_axes: Sequence[int] | None = None,
    infeed_queue: Any = None,
    device_assignment: Sequence[str] | None = None,
    name: str | None = None,
    xla_options: Any = None,
) -> list[Any]:
    """Shards `computation` without a TPU, like `tf.compat.v1.tpu.shard`.

    Builds one copy of the computation for each shard into the current graph.
    Shards can share a device. `tf_xshard.compat.v1.CrossShardOptimizer` sums
    the shards' gradients inside the graph.

    Each shard has a copy of every variable that the computation makes. Only
    shard 0's copy has the plain name, and is in the collections and in a
    default Saver. The other copies are resource variables `shard_<i>/NAME` in
    the collection `SHARD_VARIABLES`. A copy without a value takes shard 0's
    value when a session runs the shards. Inside the computation, a shard finds
    its copies in `tf.compat.v1.trainable_variables()`, under the plain names.

    Shards share a variable made outside the computation. It is updated once,
    with the sum of the gradients; several groups raise ValueError. Any other
    assignment, such as `global_step.assign(global_step + 1)`, also happens
    once, and all shards read the value from before the assignment. In a
    `tf.function`, such an assignment raises ValueError.

    Args:
      computation: A function of one tensor per input. It returns a tensor, an
        operation, None, or a list of tensors and operations.
      inputs: A list of tensors of rank 1 or more, split over the shards. A part
        has its input's shape, with the split axis divided by num_shards.
        Default: none.
      num_shards: The number of shards, at least 1. Default: 1.
      input_shard_axes: For each input, the axis to split, whose size num_shards
        must divide. Default: 0 for all.
      outputs_from_all_shards: Whether to concatenate all shards' outputs
        (scalars are stacked to shape [num_shards]) or to take shard 0's output.
        A bool, or a list with a bool for each output. Default: True.
      output_shard_axes: For each output, the axis to concatenate along.
        Default: 0 for all.
      infeed_queue: Must be None; there is no TPU to feed.
      device_assignment: A device name for each shard. Default: TensorFlow
        places the shards.
      name: Has no effect, as TensorFlow documents.
      xla_options: Must be None; XLA is not used.

    Returns:
      A list of the outputs. Without outputs, a list of one operation that runs
      all shards.

    Raises:
      TypeError: If inputs is not a list, num_shards is not an int, or an output
        can't be converted to a tensor.
      ValueError: If num_shards is not positive, the number of axes or devices
        is wrong, or infeed_queue or xla_options is given. If shards make
        different variables, or apply gradients a different number of times.
      RuntimeError: In eager mode, in another `shard`, or if gradients are
        applied in a branch, a loop or a function inside the computation.

    Example:

    >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    ...     (doubled,) = tf_xshard.compat.v1.shard(
    ...         lambda x: 2 * x, [tf.constant([1, 2, 3, 4])], num_shards=2)
    ...     session.run(doubled).tolist()
    [2, 4, 6, 8]

    Source: tf.compat.v1.tpu.shard.
    """
    del name
    if tf.executing_eagerly():
        raise RuntimeError(
            "shard() builds a graph, but TensorFlow is running eagerly. Call it"
            " in a tf.function, or in a tf.Graph."
        )
    if traced_shards.current() is not None:
        raise RuntimeError(
            "shard() is called inside another shard(). Remove the inner call."
        )
    num_shards = checks.positive_integer("num_shards", num_shards)
    for argument, value in (
        ("infeed_queue", infeed_queue),
        ("xla_options", xla_options),
    ):
        if value is not None:
            raise ValueError(f"{argument} needs a TPU. Leave it out.")
    inputs = [] if inputs is None else inputs
    if not isinstance(inputs, list):
        raise TypeError(
            f"inputs must be a list of tensors or None, got {type(inputs)}."
        )
    devices: Sequence[str | None] = device_assignment or [None] * num_shards
    if len(devices) != num_shards or isinstance(devices, str):
        raise ValueError(
            f"device_assignment must name {num_shards} devices, one for each"
            f" shard, got {device_assignment!r}."
        )
    inputs = [tf.convert_to_tensor(x) for x in inputs]
    axes = _one_each("input_shard_axes", input_shard_axes, 0, inputs)
    split = [
        tf.split(x, num_shards, axis=axis)
        for x, axis in zip(inputs, axes, strict=True)
    ]

    # AutoGraph's state belongs to this thread, not to the shards' threads.
    computation = autograph.as_called_by_user(computation)

    def of_shard(index: int) -> tuple[list[tf.Tensor], list[tf.Operation]]:
        return _flat_outputs(computation(*[parts[index] for parts in split]))

    team = traced_shards.Team(devices)
    outputs = team.run(of_shard)
    cross_replica_sum.replace(team)
    operations = [op for _, ops in outputs for op in ops]
    counts = {len(t) for t, _ in outputs}
    if len(counts) > 1:
        raise ValueError(
            f"Shards return different numbers of tensors, {sorted(counts)}. The"
            " computation must be the same on all shards."
        )
    of_shards = [t for t, _ in outputs]
    tensors = [list(column) for column in zip(*of_shards, strict=True)]
    if not tensors:
        return [tf.group(*operations)]
    from_all = outputs_from_all_shards
    from_all = _one_each(
        "outputs_from_all_shards",
        None if isinstance(from_all, bool) else from_all,
        from_all,
        tensors,
    )
    axes = _one_each("output_shard_axes", output_shard_axes, 0, tensors)
    results = []
    # Fetching any output runs all shards completely.
    everything = operations + [t for column in tensors for t in column]
    with tf.control_dependencies(everything):
        for column, every, axis in zip(tensors, from_all, axes, strict=True):
            if not every:
                results.append(tf.identity(column[0]))
            elif column[0].shape.rank == 0:
                results.append(tf.stack(column))
            else:
                results.append(tf.concat(column, axis))
    return results


def _one_each(
    argument: str,
    values: Sequence[Any] | None,
    default: Any,
    tensors: Sequence[Any],
) -> list[Any]:
    """Lists one value for each tensor; an error names the argument."""
    if values is None:
        return [default] * len(tensors)
    if len(values) != len(tensors):
        raise ValueError(
            f"{argument} has {len(values)} entries for {len(tensors)} tensors:"
            f" {list(values)!r}. Pass one entry for each tensor."
        )
    return list(values)


def _flat_outputs(
    outputs: Any,
) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """Splits a shard's outputs into tensors (same shapes) and operations."""
    if outputs is None:
        outputs = []
    elif not isinstance(outputs, (list, tuple)):
        outputs = [outputs]
    operations = [o for o in outputs if isinstance(o, tf.Operation)]
    tensors = [
        tf.convert_to_tensor(o)
        for o in outputs
        if o is not None and not isinstance(o, tf.Operation)
    ]
    with tf.control_dependencies(operations):
        # As on a TPU, outputs wait for the computation's operations.
        tensors = [tf.identity(tensor) for tensor in tensors]
    return tensors, operations
