"""Per-replica gradients -> gradients that are reduced over the group.

gradients of replica r:   dense        IndexedSlices        None
                            |                |                |
  agree on the pattern      |                |      zeros, if another replica
                            |                |      of the group has one
  pack into buckets      [flat]              |
  group sum or gather       |            sum of rows
  unpack, scale             |                |
                          dense        IndexedSlices, each index once
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tf_xshard import collectives
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.collectives import cross_replica_sum
from tf_xshard.distribute import indexed_slices
from tf_xshard.distribute import replica_context
from tf_xshard.private import tensorflow as private_tensorflow
from tf_xshard.reduction import negotiation

# CollectiveReduceV2 and CrossReplicaSum have kernels for these.
_SUMMABLE = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


def standardized(gradients: Sequence, variables: Sequence) -> list:
    """Gradients as tensors, or as IndexedSlices with each index once.

    Raises:
      TypeError: If a gradient is not a floating point number.
      ValueError: If a gradient does not have its variable's shape.
    """
    result = []
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is None:
            result.append(None)
            continue
        if not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
        if gradient.dtype not in _SUMMABLE:
            raise TypeError(
                f"The gradient for variable {variable.name!r} has type"
                f" {gradient.dtype.name}. Supported:"
                f" {[dtype.name for dtype in _SUMMABLE]}."
            )
        if not gradient.shape.is_compatible_with(variable.shape):
            raise ValueError(
                f"The gradient for variable {variable.name!r} has shape"
                f" {gradient.shape}, and the variable has {variable.shape}."
                " Gradients and variables must be in the same order."
            )
        if isinstance(gradient, tf.IndexedSlices):
            if private_tensorflow.in_xla():
                # XLA needs static shapes, which the number of different
                # indices is not.
                gradient = indexed_slices.dense(gradient, variable)
            else:
                gradient = indexed_slices.deduplicated(gradient)
        elif not gradient.shape.is_fully_defined():
            gradient = tf.ensure_shape(gradient, variable.shape)
        result.append(gradient)
    return result


def scaled(gradient, factor: float):
    """`gradient * factor`, untouched where the factor is 1."""
    if not tf.is_tensor(factor) and factor == 1:
        return gradient
    return indexed_slices.map_values(
        lambda values: values * tf.cast(factor, values.dtype), gradient
    )


def group_sum(
    gradients: Sequence,
    variables: Sequence,
    *,
    here: replica_context.Here,
    groups: group_assignment_lib.GroupAssignment,
    communication: communication_lib.Communication,
    known_patterns: dict,
) -> list:
    """The sum of every gradient over the group of this replica.

    Args:
      gradients: This replica's, as `standardized` returns them: dense tensors,
        IndexedSlices or None.
      variables: The variables they belong to.
      here: Where the code runs.
      groups: Who reduces with whom.
      communication: How gradients travel.
      known_patterns: A dict that the optimizer keeps between traces.

    Returns:
      A list like `gradients`, with the same bits on all replicas of a group.
      None where no replica of the group has a gradient.
    """
    if groups.group_size == 1:
        return list(gradients)
    patterns = negotiation.agree(
        gradients,
        variables,
        here,
        communication.timeout_seconds,
        known_patterns,
    )
    transport = collectives.choose(here, groups)
    if here.replica_id is None:
        group = patterns
    else:
        members = tuple(groups)[groups.group_of(here.replica_id)]
        group = [patterns[r] for r in members]
    # Where an operation spans all groups, all replicas must put the same
    # tensors into it, also those that their own group has no gradient for.
    taking_part = patterns if transport.spans_groups else group
    dense, sparse = [], []
    for index in range(len(variables)):
        kinds = {pattern[index][0] for pattern in taking_part}
        if kinds == {negotiation.NONE}:
            continue
        is_sparse = negotiation.DENSE not in kinds
        if is_sparse and transport.group_gather is not None:
            sparse.append(index)
        else:
            dense.append(index)
    dtypes = [
        next((entry[i][1] for entry in taking_part if entry[i][1]), None)
        for i in range(len(variables))
    ]
    result = [None] * len(variables)
    summed = sum_dense(
        [_as_dense(gradients[i], variables[i], dtypes[i]) for i in dense],
        transport,
        (here, groups, communication),
    )
    gathered = _sum_sparse(
        [_as_sparse(gradients[i], variables[i], dtypes[i]) for i in sparse],
        transport,
        (here, groups, communication),
    )
    for index, value in zip(dense + sparse, summed + gathered, strict=True):
        held = any(p[index][0] != negotiation.NONE for p in group)
        result[index] = value if held else None
    return result


def _as_dense(gradient, variable, dtype) -> tf.Tensor:
    if gradient is None:
        return tf.zeros(variable.shape, dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return indexed_slices.dense(gradient, variable)
    return gradient


def _as_sparse(gradient, variable, dtype) -> tf.IndexedSlices:
    if gradient is None:
        return tf.IndexedSlices(
            tf.zeros([0, *variable.shape[1:]], dtype),
            tf.zeros([0], tf.int64),
            tf.constant(variable.shape.as_list(), tf.int64),
        )
    return gradient


def sum_dense(tensors, transport, where) -> list[tf.Tensor]:
    """The group sums of dense tensors, packed into buckets where that helps.

    Args:
      tensors: This replica's tensors.
      transport: The `Transport` to use.
      where: A tuple of `Here`, `GroupAssignment` and `Communication`.

    Returns:
      The sums, in the order of `tensors` and in their types.
    """
    if not tensors:
        return []
    here, groups, communication = where

    def on_wire(tensor):
        dtype = communication.dtype_of_sum(tensor.dtype.name, groups.group_size)
        if here.kind == "tpu":
            cross_replica_sum.check_dtype(tf.as_dtype(dtype))
        return tf.cast(tensor, dtype)

    if not transport.packs:
        parts = [on_wire(tensor) for tensor in tensors]
        sums = transport.group_sum(parts, here, groups, communication)
        return [
            tf.cast(total, tensor.dtype)
            for total, tensor in zip(sums, tensors, strict=True)
        ]
    # The backward pass ends with the first layers' gradients. The last layers'
    # travel first, while it still runs.
    order = list(reversed(range(len(tensors))))
    buckets = _buckets(
        [tensors[i] for i in order], communication.bytes_per_bucket
    )
    packed = [
        on_wire(_packed([tensors[order[i]] for i in bucket]))
        for bucket in buckets
    ]
    sums = transport.group_sum(packed, here, groups, communication)
    result = [None] * len(tensors)
    for bucket, total in zip(buckets, sums, strict=True):
        members = [order[i] for i in bucket]
        total = tf.cast(total, tensors[members[0]].dtype)
        for i, part in zip(
            members,
            _unpacked(total, [tensors[i].shape for i in members]),
            strict=True,
        ):
            result[i] = part
    return result


def _buckets(tensors, bytes_per_bucket) -> list[list[int]]:
    """Positions of neighbours of one type that fit into a bucket together."""
    buckets, open_bucket = [], {}
    for position, tensor in enumerate(tensors):
        size = tensor.shape.num_elements() * tensor.dtype.size
        bucket, filled = open_bucket.get(tensor.dtype, (None, 0))
        if bucket is None or filled + size > bytes_per_bucket:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(position)
        open_bucket[tensor.dtype] = (bucket, filled + size)
    return buckets


def _packed(tensors) -> tf.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def _unpacked(total, shapes) -> list[tf.Tensor]:
    if len(shapes) == 1:
        return [total]
    parts = tf.split(total, [math.prod(shape) for shape in shapes])
    return [
        tf.reshape(part, shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]


def _sum_sparse(slices, transport, where) -> list[tf.IndexedSlices]:
    if not slices:
        return []
    here, groups, communication = where
    tensors = []
    for one in slices:
        # Rows are added up where they arrive, in their own type.
        tensors.append(tf.cast(one.values, communication.dtype or one.dtype))
        tensors.append(tf.cast(one.indices, tf.int64))
    gathered = transport.group_gather(tensors, here, groups, communication)
    return [
        indexed_slices.deduplicated(
            tf.IndexedSlices(
                tf.cast(values, one.dtype),
                tf.cast(indices, one.indices.dtype),
                one.dense_shape,
            )
        )
        for one, values, indices in zip(
            slices, gathered[::2], gathered[1::2], strict=True
        )
    ]
