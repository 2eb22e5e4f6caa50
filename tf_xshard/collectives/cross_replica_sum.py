"""TPUStrategy: `CrossReplicaSum`, native to the TPU.

Over all replicas it is the strategy's own all-reduce; inside groups it is what
that emits, plus the group assignment. Gradients go one by one: the TPU compiler
combines all-reduces itself. There is no timeout: the hardware's interconnect
takes none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf
from absl import logging

from tf_xshard.collectives import transport

# TensorFlow's CrossReplicaSum has no other.
_DTYPES = (tf.bfloat16, tf.float16, tf.float32, tf.int32, tf.uint32)


def check_dtype(dtype: tf.DType) -> None:
    """Refuses what a TPU cannot sum over replicas.

    Args:
      dtype: The type in which gradients are summed.

    Raises:
      ValueError: If `CrossReplicaSum` does not take it.
    """
    if dtype not in _DTYPES:
        names = ", ".join(known.name for known in _DTYPES)
        raise ValueError(
            f"A gradient of {dtype.name} can't be summed over replicas of a"
            f" TPU, which takes {names}. Give the variable one of these types,"
            " or communicate gradients as one:"
            ' communication=tf_xshard.Communication(dtype="float32").'
        )


class _CrossReplicaSum(transport.Transport):
    """What both have in common."""

    def check_dtype(self, dtype: tf.DType) -> None:
        """See `Transport.check_dtype`."""
        check_dtype(dtype)


class OverAllReplicas(_CrossReplicaSum):
    """One group of all replicas."""

    name = "the strategy's all_reduce (CrossReplicaSum)"

    def _sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, list(tensors)
        )


class InGroups(_CrossReplicaSum):
    """Groups, where a device assignment has fixed XLA's replica numbering."""

    name = "CrossReplicaSum with a group assignment"

    def _sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [
            tf.raw_ops.CrossReplicaSum(
                input=tensor, group_assignment=self.groups.to_list()
            )
            for tensor in tensors
        ]


@functools.cache
def tell_how_to_get_the_fast_path() -> None:
    """Says once per process why groups take the slower path, and the remedy."""
    logging.warning(
        "TPUStrategy was made without a device assignment, so XLA's replica"
        " numbering may differ from replica_id_in_sync_group, and group sums"
        " are communicated as a stack with num_groups times the bytes. For the"
        " fast path:"
        " topology = tf.tpu.experimental.initialize_tpu_system(resolver);"
        " assignment = tf.tpu.experimental.DeviceAssignment.build(topology,"
        " num_replicas=...); tf.distribute.TPUStrategy(resolver,"
        " experimental_device_assignment=assignment)."
    )
