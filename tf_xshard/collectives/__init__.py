"""How the replicas of a group communicate: one file per path, one signature.

Enters: this replica's tensors. Leaves: their sums, or their concatenation, over
the replica's group. `transport_for` returns an object bound to the replica and
its `Channel`, with `sum`, `gather` and `check_dtype`. Imports `distribute` and
above.

| where | path |
|---|---|
| one replica | none: the identity, handled by callers |
| Mirrored, MultiWorkerMirrored in a `tf.function` | `subgroups` |
| Mirrored, eager or in a graph of TF1 | `merge_call` |
| MultiWorkerMirrored, eager | `one_hot` |
| TPU, one group of all | `cross_replica_sum`, over all |
| TPU with a device assignment | `cross_replica_sum`, in groups |
| TPU without one | `one_hot` |

- `transport`: the one signature of every path.
- `subgroups`: `CollectiveReduceV2` with one group key per group.
- `merge_call`: a sum per group in cross-replica context.
- `one_hot`: the strategy's own all-reduce over a stack.
- `cross_replica_sum`: the TPU's own operation.
- `process_gather`: bytes from every process, outside of a step.
- `watchdog`: a timeout for every collective.
- `counters`: counts operations and bytes while they run.
- `recorder`: records operations while a step is traced.
- `runtime_variables`: variables for one runtime context of TensorFlow.
- `channel`: who communicates with whom, how, and under which number.
"""

from __future__ import annotations

import tensorflow as tf

from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.collectives import channel as channel_lib
from tf_xshard.collectives import cross_replica_sum
from tf_xshard.collectives import merge_call
from tf_xshard.collectives import one_hot
from tf_xshard.collectives import subgroups
from tf_xshard.collectives import transport
from tf_xshard.distribute import site as site_lib
from tf_xshard.private.tensorflow import tracing


def transport_for(
    site: site_lib.Site, channel: channel_lib.Channel
) -> transport.Transport:
    """The path on which a group of several replicas communicates here."""
    site_lib.check_devices(site.strategy)
    return _path(site, channel.groups)(site, channel)


def _path(
    site: site_lib.Site, groups: group_assignment_lib.GroupAssignment
) -> type[transport.Transport]:
    # In a graph run by a Session, collectives lack what a tf.function has.
    eager = (
        tf.executing_eagerly()
        or not tf.compat.v1.executing_eagerly_outside_functions()
    )
    if site.kind == "mirrored":
        return merge_call.MergeCall if eager else subgroups.Subgroups
    if site.kind == "multi_worker":
        return one_hot.OneHot if eager else subgroups.Subgroups
    assert site.kind == "tpu", site.kind
    if groups.num_groups == 1:
        return cross_replica_sum.OverAllReplicas
    if tracing.has_device_assignment(site.strategy):
        return cross_replica_sum.InGroups
    cross_replica_sum.warn_about_the_slow_path()
    return one_hot.OneHotOnTPU
