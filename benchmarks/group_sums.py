"""The ways to sum over groups that benchmarks/multi_worker.py compares."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment
from tf_xshard.collectives import mpi
from tf_xshard.collectives import one_hot
from tf_xshard.collectives import recorder
from tf_xshard.collectives import subgroups
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.reduction import buckets
from tf_xshard.reduction import gradients
from tf_xshard.reduction import quantization
from tf_xshard.reduction import reducer

GROUPS = group_assignment.GroupAssignment([[0, 2], [1, 3]])
# 81 layers of 800 x 800 and their biases.
SHAPES = [shape for _ in range(81) for shape in ((800, 800), (800,))]
GRADIENT_BYTES = 4 * sum(int(np.prod(shape)) for shape in SHAPES)
# Made by a worker when it begins.
VARIABLES: list = []
RESIDUALS: list = []
OURS, ONE_HOT, ALL_GATHER = "ours, float32", "one-hot", "all_gather"
AGAIN, BFLOAT16 = "ours, float32, again", "ours, bfloat16"
INT8, FEEDBACK = "ours, int8", "ours, int8 with error feedback"
MPI, MPI_BFLOAT16 = "ours over MPI, float32", "ours over MPI, bfloat16"
MPI_INT8 = "ours over MPI, int8"
EVERYONE = "strategy's all_reduce over all four"


def _ours(tensors, site, transport=subgroups.Subgroups, **communication):
    how = communication_lib.Communication(**communication)
    path = transport(site, transport_lib.Channel(GROUPS, how))
    return buckets.sum_dense(tensors, path).values


def _in_blocks(tensors, site, size):
    """8-bit integers with one scale for so many numbers."""
    before = quantization.NUMBERS_PER_BLOCK
    quantization.NUMBERS_PER_BLOCK = size
    try:
        return _ours(tensors, site, dtype="int8")
    finally:
        quantization.NUMBERS_PER_BLOCK = before


def _with_feedback(tensors, site):
    """With the residuals that an optimizer keeps."""
    how = communication_lib.Communication(
        dtype="int8", error_feedback=True, transport="tensorflow"
    )
    [residuals] = RESIDUALS
    sums, carry = reducer.GradientReducer(how).sum(
        gradients.GradientBatch(list(tensors), VARIABLES),
        site,
        GROUPS,
        residuals.read(1),
    )
    residuals.keep(carry, None)
    return sums.values


class _AllToAll(subgroups.Subgroups):
    """A sum as all-to-all, additions and all-gather, not as a ring."""

    def sum(self, tensors):
        size = self.groups.group_size
        rows = [tf.reshape(tensor, [size, -1]) for tensor in tensors]
        gathered = self.all_gather(self.reduce_scatter(rows))
        return [
            tf.reshape(one, tensor.shape)
            for one, tensor in zip(gathered, tensors, strict=True)
        ]


class _Gathered(subgroups.Subgroups):
    """A sum as all-gather and additions: as many bytes, in groups of two."""

    def sum(self, tensors):
        size = self.groups.group_size
        return [
            tf.add_n(tf.unstack(one, num=size))
            for one in self.all_gather(tensors)
        ]


class _MPIsOwn(mpi.MPI):
    """A sum as MPI's own all-reduce, instead of messages."""

    def _all_reduce(self, position, tensor):
        return self._call(
            recorder.ALL_REDUCE, position, tensor, _mpis_own, tensor.shape
        )


def _mpis_own(comm, array, wait):
    total = np.empty_like(array)
    wait([comm.Iallreduce(array, total)])
    return total


def _all_gather(tensors, site):
    flat = tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)
    gathered = tf.distribute.get_replica_context().all_gather(
        flat[tf.newaxis], axis=0
    )
    members = list(GROUPS)[GROUPS.group_of(site.replica_id)]
    total = tf.add_n([gathered[member] for member in members])
    return tf.split(total, [int(np.prod(shape)) for shape in SHAPES])


def _everyone(tensors, site):
    del site
    return tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, tensors
    )


SETTINGS = {
    "one per tensor": dict(bytes_per_bucket=1),
    **{
        f"buckets of {size} MiB": dict(bytes_per_bucket=size << 20)
        for size in (1, 2, 4, 8, 32, 64)
    },
    "all in one bucket": dict(bytes_per_bucket=1 << 30),
    **{
        f"{count} in flight": dict(buckets_in_flight=count)
        for count in (1, 2, 8)
    },
}
VARIANTS = {
    OURS: _ours,
    AGAIN: _ours,
    BFLOAT16: functools.partial(_ours, dtype="bfloat16"),
    INT8: functools.partial(_ours, dtype="int8"),
    FEEDBACK: _with_feedback,
    MPI: functools.partial(_ours, transport=mpi.MPI),
    MPI_BFLOAT16: functools.partial(_ours, transport=mpi.MPI, dtype="bfloat16"),
    MPI_INT8: functools.partial(_ours, transport=mpi.MPI, dtype="int8"),
    "MPI's own all-reduce": functools.partial(_ours, transport=_MPIsOwn),
    **{
        f"{INT8}, blocks of {size}": functools.partial(_in_blocks, size=size)
        for size in (64, 1024)
    },
    **{
        name: functools.partial(_ours, **setting)
        for name, setting in SETTINGS.items()
    },
    "all-to-all and all-gather": functools.partial(_ours, transport=_AllToAll),
    "all-gather, then sums": functools.partial(_ours, transport=_Gathered),
    ONE_HOT: functools.partial(_ours, transport=one_hot.OneHot),
    ALL_GATHER: _all_gather,
    EVERYONE: _everyone,
}
