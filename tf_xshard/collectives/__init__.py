"""Sums and gathers tensors over a group, with one file per path.

Enters: this replica's tensors. Leaves: their sums, or their concatenation, over
the replica's group. `transport_for` returns the `Transport` of a replica and
its `Channel`. Imports `distribute` and above.

| where | path |
|---|---|
| one replica | none (callers return the tensors) |
| Mirrored, MultiWorkerMirrored in a `tf.function` | `subgroups` |
| Mirrored, eager or in a graph of TF1 | `merge_call` |
| MultiWorkerMirrored, eager | `one_hot` |
| MultiWorkerMirrored under MPI (`Communication.transport`) | `mpi` |
| TPU, one group of all | `cross_replica_sum`, over all |
| TPU with a device assignment | `cross_replica_sum`, in groups |
| TPU without a device assignment | `one_hot` |

- `transport`: `Transport`, the base class of every path, and its `Channel`:
  groups, settings and number.
- `subgroups`: `CollectiveReduceV2` and others, with one group key per group.
- `mpi`: sends messages with mpi4py, with one communicator per group.
- `merge_call`: sums over groups in `merge_call`.
- `one_hot`: sums over groups with the strategy's own all-reduce.
- `cross_replica_sum`: `CrossReplicaSum`, and the dtypes that TPUs can sum.
- `process_gather`: gathers bytes from every process, outside of a step, and
  names a worker that does not take part.
- `watchdog`: the timeout of every collective in a step.
- `silent_workers`: names the workers that the others wait for.
- `counters`: counts collectives, bytes and seconds while a step runs.
- `recorder`: records collectives while a step is traced, for plans.
- `runtime_variables`: variables for the watchdog, the counters and tokens.
"""

from __future__ import annotations

import tensorflow as tf

from tf_xshard.collectives import cross_replica_sum
from tf_xshard.collectives import merge_call
from tf_xshard.collectives import mpi
from tf_xshard.collectives import one_hot
from tf_xshard.collectives import subgroups
from tf_xshard.collectives import transport
from tf_xshard.distribute import site as site_lib
from tf_xshard.private.tensorflow import tracing


def transport_for(
    site: site_lib.Site, channel: transport.Channel
) -> transport.Transport:
    """Returns the transport of this replica's group of several replicas."""
    site_lib.check_devices(site.strategy)
    return _path(site, channel)(site, channel)


def _path(
    site: site_lib.Site, channel: transport.Channel
) -> type[transport.Transport]:
    # Collectives need features of a tf.function that a Session's graph lacks.
    in_session = not tf.compat.v1.executing_eagerly_outside_functions()
    eager = tf.executing_eagerly() or in_session
    if mpi.is_chosen(site, channel.communication):
        return mpi.MPI
    if site.kind == "mirrored":
        return merge_call.MergeCall if eager else subgroups.Subgroups
    if site.kind == "multi_worker":
        return one_hot.OneHot if eager else subgroups.Subgroups
    assert site.kind == "tpu", site.kind
    if channel.groups.num_groups == 1:
        return cross_replica_sum.OverAllReplicas
    if tracing.has_device_assignment(site.strategy):
        return cross_replica_sum.InGroups
    cross_replica_sum.warn_about_the_slow_path()
    return one_hot.OneHotOnTPU
