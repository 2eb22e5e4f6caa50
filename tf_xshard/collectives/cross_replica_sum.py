"""TPUStrategy: `CrossReplicaSum`, native to the TPU.

`STRATEGY` is the strategy's own all-reduce over all replicas; `NATIVE` emits
what that emits, plus the group assignment. Gradients go one by one: the TPU
compiler combines all-reduces itself.
"""

from __future__ import annotations

import functools

import tensorflow as tf
from absl import logging

from tf_xshard.collectives import transport

# TensorFlow's CrossReplicaSum has no other.
_DTYPES = (tf.bfloat16, tf.float16, tf.float32, tf.int32, tf.uint32)


def check_dtype(dtype: tf.DType) -> None:
    """Refuses what a TPU can't sum over replicas.

    Args:
      dtype: In which type gradients travel.

    Raises:
      ValueError: If `CrossReplicaSum` does not take it.
    """
    if dtype not in _DTYPES:
        names = ", ".join(known.name for known in _DTYPES)
        raise ValueError(
            f"A gradient of {dtype.name} can't be summed over replicas of a"
            f" TPU, which takes {names}. Give the variable one of these types,"
            " or let gradients travel as one:"
            ' communication=tf_xshard.Communication(dtype="float32").'
        )


def _sum_over_all(tensors, here, groups, communication):
    # On a TPU the hardware's interconnect needs no timeout and takes none.
    del here, groups, communication
    return tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, list(tensors)
    )


def _sum_in_groups(tensors, here, groups, communication):
    del here, communication
    return [
        tf.raw_ops.CrossReplicaSum(
            input=tensor, group_assignment=groups.to_list()
        )
        for tensor in tensors
    ]


@functools.cache
def tell_how_to_get_the_fast_path() -> None:
    """Says once per process why groups take the slower path, and the remedy."""
    logging.warning(
        "TPUStrategy was made without a device assignment, so XLA's replica"
        " numbering may differ from replica_id_in_sync_group, and group sums"
        " travel as a stack with num_groups times the bytes. For the fast path:"
        " topology = tf.tpu.experimental.initialize_tpu_system(resolver);"
        " assignment = tf.tpu.experimental.DeviceAssignment.build(topology,"
        " num_replicas=...); tf.distribute.TPUStrategy(resolver,"
        " experimental_device_assignment=assignment)."
    )


STRATEGY = transport.Transport(
    name="the strategy's all_reduce (CrossReplicaSum)",
    group_sum=_sum_over_all,
)
NATIVE = transport.Transport(
    name="CrossReplicaSum with a group assignment",
    group_sum=_sum_in_groups,
)
