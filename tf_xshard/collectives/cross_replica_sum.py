"""Sums over replicas of a TPU with TPUs' own operation, `CrossReplicaSum`.

Over all replicas, the strategy's own all-reduce sums. Over groups, the same
operation gets a group assignment. Gradients are summed one by one, since the
TPU compiler combines all-reduces itself. There is no timeout, since the
interconnect does not support timeouts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf
from absl import logging

from tf_xshard.collectives import recorder
from tf_xshard.collectives import transport

# The types that TensorFlow's CrossReplicaSum supports.
_DTYPES = (tf.bfloat16, tf.float16, tf.float32, tf.int32, tf.uint32)


def check_dtype(dtype: tf.DType) -> None:
    """Raises ValueError for dtypes that a TPU can't sum over replicas."""
    if dtype not in _DTYPES:
        names = ", ".join(known.name for known in _DTYPES)
        raise ValueError(
            f"A gradient of {dtype.name} can't be summed over replicas of a"
            f" TPU, which supports {names}. Give the variable one of these"
            " types, or communicate gradients in one of them:"
            ' communication=tf_xshard.Communication(dtype="float32").'
        )


class _CrossReplicaSum(transport.Transport):
    """Holds the methods that `OverAllReplicas` and `InGroups` share."""

    def check_dtype(self, dtype: tf.DType) -> None:
        """See `Transport.check_dtype`."""
        check_dtype(dtype)

    def _note_all(self, tensors: Sequence[tf.Tensor]) -> None:
        for position, tensor in enumerate(tensors):
            self._note(recorder.ALL_REDUCE, tensor, position)


class OverAllReplicas(_CrossReplicaSum):
    """Communicates in one group of all replicas."""

    name = "the strategy's all_reduce (CrossReplicaSum)"

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.sum`."""
        self._note_all(tensors)
        return tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, list(tensors)
        )


class InGroups(_CrossReplicaSum):
    """Communicates in groups; a device assignment must fix XLA's numbering."""

    name = "CrossReplicaSum with a group assignment"

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Transport.sum`."""
        self._note_all(tensors)
        return [
            tf.raw_ops.CrossReplicaSum(
                input=tensor, group_assignment=self.channel.groups.to_list()
            )
            for tensor in tensors
        ]


@functools.cache
def warn_about_the_slow_path() -> None:
    """Warns once per process that groups are slow, and says what to do."""
    logging.warning(
        "TPUStrategy was created without a device assignment, so XLA's replica"
        " numbering may differ from replica_id_in_sync_group, and group sums"
        " are communicated as a stack with num_groups times the bytes. For the"
        " fast path:"
        " topology = tf.tpu.experimental.initialize_tpu_system(resolver);"
        " assignment = tf.tpu.experimental.DeviceAssignment.build(topology,"
        " num_replicas=...); tf.distribute.TPUStrategy(resolver,"
        " experimental_device_assignment=assignment)."
    )
