"""`shard`: several shards of one computation in one graph, with no TPU.

inputs --split--> shard 0 -- gradients --+               +-- shard 0 --+
                  shard 1 -- gradients --+-- group sum --+-- shard 1 --+--
                  ...                    |   (add_n)     |   ...       |
                                         +---------------+            joined
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_xshard import checks
from tf_xshard.compat.v1 import shard_team
from tf_xshard.private import tensorflow as private_tensorflow


def shard_initializer() -> tf.Operation:
    """An operation that gives all shards' copies shard 0's values.

    A copy that was never set takes shard 0's value by itself, when a session
    first runs the shards. Only what changes shard 0's variables later, such as
    a `Saver.restore` in the middle of training, needs this.

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
                shard_team.SHARD_VARIABLES
            )
        ]
    )


@private_tensorflow.entry_point
def shard(
    computation: Callable,
    inputs: Sequence | None = None,
    num_shards: int = 1,
    input_shard_axes: Sequence[int] | None = None,
    outputs_from_all_shards: bool | Sequence[bool] = True,
    output_shard_axes: Sequence[int] | None = None,
    infeed_queue=None,
    device_assignment: Sequence[str] | None = None,
    name: str | None = None,
    xla_options=None,
) -> list:
    """Shards `computation`, with no TPU; like `tf.compat.v1.tpu.shard`.

    Builds one copy of the computation for each shard into the current graph.
    Shards may share a device: their gradients meet inside the graph, in
    `tf_xshard.compat.v1.CrossShardOptimizer`.

    Each shard has a copy of every variable that the computation makes. Shard
    0's has the plain name and is the only one in the collections and in a
    default Saver. The others are resource variables `shard_<i>/NAME` in the
    collection `SHARD_VARIABLES`, and take shard 0's value in the first
    `session.run` of the shards in which they have none. Inside the computation
    each shard finds its own in `tf.compat.v1.trainable_variables()`. A variable
    made outside the computation is shared: the gradients' sum is applied to it
    once, which groups can't share.

    Args:
      computation: A function of one tensor per input. It returns a tensor, an
        operation, None, or a list of tensors and operations.
      inputs: A list of tensors, split over the shards. Default: none.
      num_shards: The number of shards, at least 1. Default: 1.
      input_shard_axes: For each input the axis along which it is split, which
        the number of shards must divide. Default: 0 for all.
      outputs_from_all_shards: Whether the shards' outputs are concatenated
        (scalars: stacked), or shard 0's is taken; one bool, or one for each
        output. Default: True.
      output_shard_axes: For each output the axis to concatenate along. Default:
        0 for all.
      infeed_queue: Refused: there is no TPU to feed.
      device_assignment: A device name for each shard. Default: no device is
        asked for.
      name: Does nothing, as documented.
      xla_options: Refused: XLA takes no part.

    Returns:
      The outputs. If there are none, a list of one operation, after which all
      shards have run.

    Raises:
      TypeError: If inputs is no list, or something is returned that can't be a
        tensor.
      ValueError: If a number of axes, devices or shards does not fit, if
        infeed_queue or xla_options is given, or if shards differ in the
        variables that they make or the number of times that they apply
        gradients.
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
    if shard_team.current() is not None:
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
    devices = device_assignment or [None] * num_shards
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

    # Here, since other shards are traced by threads of their own.
    computation = private_tensorflow.as_called_by_user(computation)

    def of_shard(index):
        return _flat_outputs(computation(*[parts[index] for parts in split]))

    outputs = shard_team.Team(devices).run(of_shard)
    operations = [op for _, ops in outputs for op in ops]
    tensors = [list(column) for column in zip(*[t for t, _ in outputs])]
    counts = {len(t) for t, _ in outputs}
    if len(counts) > 1:
        raise ValueError(f"Shards return {sorted(counts)} tensors.")
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
    # Whatever is read, all shards run whole.
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


def _one_each(argument, values, default, tensors) -> list:
    if values is None:
        return [default] * len(tensors)
    if len(values) != len(tensors):
        raise ValueError(
            f"{argument} has {len(values)} entries for {len(tensors)} tensors:"
            f" {list(values)!r}."
        )
    return list(values)


def _flat_outputs(outputs) -> tuple[list, list]:
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
