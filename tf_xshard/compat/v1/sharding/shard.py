"""`shard`: several shards of one computation in one graph, with no TPU.

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
from tf_xshard.compat.v1.sharding import traced_shards
from tf_xshard.private.tensorflow import autograph


def shard_initializer() -> tf.Operation:
    """An operation that gives all shards' copies shard 0's values.

    A copy without a value takes shard 0's by itself, when a session first runs
    the shards. This is only needed after shard 0's variables are changed later,
    such as by a `Saver.restore` in the middle of training.

    Returns:
      An operation, of the current graph.

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
    """Shards `computation`, with no TPU; like `tf.compat.v1.tpu.shard`.

    Builds one copy of the computation for each shard into the current graph.
    Shards may share a device: `tf_xshard.compat.v1.CrossShardOptimizer` sums
    their gradients inside the graph.

    Each shard has a copy of every variable that the computation makes. Shard
    0's has the plain name and is the only one in the collections and in a
    default Saver. The others are resource variables `shard_<i>/NAME` in the
    collection `SHARD_VARIABLES`, and take shard 0's value in the first
    `session.run` of the shards in which they have none. Inside the computation
    each shard finds its own in `tf.compat.v1.trainable_variables()`, under the
    plain names. A variable made outside the computation is shared: the sum of
    the gradients is applied to it once, which is refused with several groups.
    Whatever else assigns it, such as `global_step.assign(global_step + 1)`,
    does so once, and all shards read it as it was before; in a `tf.function`
    that is refused.

    Args:
      computation: A function of one tensor per input. It returns a tensor, an
        operation, None, or a list of tensors and operations.
      inputs: A list of tensors of rank 1 or more, split over the shards: a
        shard's part has the input's shape, with that axis divided by
        num_shards. Default: none.
      num_shards: The number of shards, at least 1. Default: 1.
      input_shard_axes: For each input the axis along which it is split, which
        the number of shards must divide. Default: 0 for all.
      outputs_from_all_shards: Whether the shards' outputs are concatenated
        (scalars: stacked to shape [num_shards]), or shard 0's is taken; one
        bool, or one for each output. Default: True.
      output_shard_axes: For each output the axis to concatenate along. Default:
        0 for all.
      infeed_queue: Refused: there is no TPU to feed.
      device_assignment: A device name for each shard. Default: TensorFlow
        places the shards.
      name: Does nothing, as documented.
      xla_options: Refused: XLA is not used.

    Returns:
      A list of the outputs. If there are none, a list of one operation, after
      which all shards have run.

    Raises:
      TypeError: If inputs is not a list, num_shards is not an int, or an output
        can't be converted to a tensor.
      ValueError: If num_shards is not positive, if there are too few or too
        many axes or devices, if infeed_queue or xla_options is given, or if
        shards make different variables or apply gradients a different number of
        times.
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
            "shard() builds a graph, and TensorFlow runs eagerly. Call it in a"
            " tf.function, or in a tf.Graph."
        )
    if traced_shards.current() is not None:
        raise RuntimeError("shard() is called inside another shard().")
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

    # Not in the shards' threads: AutoGraph's state belongs to this thread.
    computation = autograph.as_called_by_user(computation)

    def of_shard(index: int) -> tuple[list[tf.Tensor], list[tf.Operation]]:
        return _flat_outputs(computation(*[parts[index] for parts in split]))

    outputs = traced_shards.Team(devices).run(of_shard)
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
    """One value for each tensor, or an error that names the argument."""
    if values is None:
        return [default] * len(tensors)
    if len(values) != len(tensors):
        raise ValueError(
            f"{argument} has {len(values)} entries for {len(tensors)} tensors:"
            f" {list(values)!r}."
        )
    return list(values)


def _flat_outputs(
    outputs: Any,
) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """A shard's outputs: tensors, of unchanged shapes, and operations."""
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
        # A TPU's outputs wait for the computation's operations.
        tensors = [tf.identity(tensor) for tensor in tensors]
    return tensors, operations
