"""Checks the sums over groups of a strategy against NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tf_xshard import collectives
from tf_xshard.collectives import transport as transport_lib
from tf_xshard.distribute import site as site_lib

TIMEOUT_SECONDS = 60
# The elements differ, since replicas may get different elements.
_FACTORS = (1.0, 2.0, 3.0)


def rotated_groups(num_replicas: int) -> list[list[list[int]]]:
    """Returns assignments whose sums reveal wrongly grouped replicas."""
    # Each replica stands one place behind its number. Pairs are then neither
    # contiguous nor strided, and differ from the pairs of the transposed array.
    # With four replicas, the pairs are [[3, 0], [1, 2]].
    order = np.roll(np.arange(num_replicas), 1)
    sizes = [size for size in (2, num_replicas, 1) if num_replicas % size == 0]
    return [order.reshape(-1, size).tolist() for size in dict.fromkeys(sizes)]


def group_sums(
    strategy: tf.distribute.Strategy,
    groups: list[list[int]],
    graph: bool,
    shard_update: bool = False,
) -> tuple[str, np.ndarray]:
    """Applies each replica's gradient 10^replica * [1, 2, 3] to a weight."""
    assignment = tf_xshard.GroupAssignment(groups)
    # TPUs can't sum float64.
    is_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
    dtype = "float32" if is_tpu else "float64"
    with strategy.scope():
        weight = keras.Variable(np.zeros(len(_FACTORS)), dtype=dtype)
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0),
            "sum",
            assignment,
            loss_normalization="replica",
            communication=tf_xshard.Communication(
                timeout_seconds=TIMEOUT_SECONDS
            ),
            shard_update=shard_update,
        )
    names: list[str] = []

    def on_replica():
        context = tf.distribute.get_replica_context()
        site = site_lib.current()
        names.append(
            "identity: no communication"
            if assignment.group_size == 1
            else collectives.transport_for(
                site, transport_lib.Channel(assignment, optimizer.communication)
            ).name
        )
        gradient = tf.pow(
            tf.constant(10.0, dtype),
            tf.cast(context.replica_id_in_sync_group, dtype),
        )
        optimizer.apply([gradient * tf.constant(_FACTORS, dtype)], [weight])

    def step():
        strategy.run(on_replica)

    (tf.function(step) if graph else step)()
    values = strategy.experimental_local_results(weight.value)
    return names[0], np.array([-np.asarray(value) for value in values])


def of_strategy(
    strategy: tf.distribute.Strategy, first_replica: int = 0
) -> Iterator[tuple[bool, str]]:
    """Yields whether each group sum is NumPy's, and how it was made.

    Args:
      strategy: The strategy whose sums are checked.
      first_replica: The first replica of this process.
    """
    num_replicas = strategy.num_replicas_in_sync
    own = 10.0 ** np.arange(num_replicas)
    for groups in rotated_groups(num_replicas):
        for graph, sharded in itertools.product((True, False), repeat=2):
            if not graph and isinstance(strategy, tf.distribute.TPUStrategy):
                continue  # TPUStrategy.run needs a tf.function.
            if sharded and len(groups[0]) == 1:
                continue  # Nothing is split.
            expected = np.zeros(num_replicas)
            for members in groups:
                expected[members] = own[members].sum()
            where = f"{'tf.function' if graph else 'eager'}, {groups}"
            if sharded:
                where += ", reduce-scatter and all-gather"
            try:
                name, got = group_sums(strategy, groups, graph, sharded)
            except Exception as error:  # Every error must be reported.
                yield False, f"{where}: {type(error).__name__}: {error}"
                continue
            wanted = np.outer(
                expected[first_replica : first_replica + len(got)], _FACTORS
            )
            if np.array_equal(got, wanted):
                yield True, f"{where}: {name}"
            else:
                yield (
                    False,
                    f"{where}: {name} gave {got}, expected {wanted.tolist()}."
                    " Report this together with the lines above.",
                )
