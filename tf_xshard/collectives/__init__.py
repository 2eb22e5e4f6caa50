"""How one group sum travels: one file per path, one signature.

| where | path |
|---|---|
| one replica | none: the identity |
| MirroredStrategy, MultiWorkerMirroredStrategy in a `tf.function` |
`collective`
|
| MirroredStrategy, eager or in a graph of TF1 | `merge_call` |
| MultiWorkerMirroredStrategy, eager | `one_hot` |
| TPUStrategy, one group of all | `cross_replica_sum.STRATEGY` |
| TPUStrategy with a device assignment | `cross_replica_sum.NATIVE` |
| TPUStrategy without one | `one_hot` |
"""

from __future__ import annotations

import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.collectives import cross_replica_sum
from tf_xshard.collectives import merge_call
from tf_xshard.collectives import one_hot
from tf_xshard.collectives import subgroups
from tf_xshard.collectives import transport
from tf_xshard.distribute import replica_context
from tf_xshard.private import tensorflow as private_tensorflow


def choose(
    here: replica_context.Here, groups: group_assignment_lib.GroupAssignment
) -> transport.Transport:
    """The path of a group sum, for where the calling code runs.

    Args:
      here: Where the code runs; more than one replica.
      groups: Who reduces with whom.

    Returns:
      The `Transport`.
    """
    # In a graph that a Session runs, collectives lack what a tf.function has.
    eager = (
        tf.executing_eagerly()
        or not tf.compat.v1.executing_eagerly_outside_functions()
    )
    if here.kind == "mirrored":
        return merge_call.TRANSPORT if eager else subgroups.TRANSPORT
    if here.kind == "multi_worker":
        return one_hot.TRANSPORT if eager else subgroups.TRANSPORT
    assert here.kind == "tpu", here.kind
    if groups.num_groups == 1:
        return cross_replica_sum.STRATEGY
    if private_tensorflow.has_device_assignment(here.strategy):
        return cross_replica_sum.NATIVE
    cross_replica_sum.tell_how_to_get_the_fast_path()
    return one_hot.TRANSPORT
