"""Strategies over logical CPUs, and the values that every replica holds."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

needs_multi_optimizer = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"),
    reason="this Keras has no MultiOptimizer",
)


@functools.cache
def mirrored(num_replicas: int) -> tf.distribute.MirroredStrategy:
    """One strategy per number of replicas, shared by all tests."""
    # Plain Keras' collectives of two strategies in one process would meet under
    # one key ("Shape mismatch in the collective instance 100").
    tf.distribute.MirroredStrategy._collective_key_base += 100_000
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(num_replicas)]
    )


def tensor_of(variable):
    return variable.value if isinstance(variable, keras.Variable) else variable


def values(strategy, variable) -> list[np.ndarray]:
    """A variable's value on every replica, in the order of replica ids."""
    if strategy is None:
        return [np.asarray(tensor_of(variable))]
    return [
        np.asarray(one)
        for one in strategy.experimental_local_results(tensor_of(variable))
    ]


def replica_id() -> int:
    """This replica's id, in replica context."""
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def apply_once(strategy, optimizer, gradients_of, variables, graph=True):
    """Applies `gradients_of(replica_id)` on every replica."""

    def on_replica():
        optimizer.apply(gradients_of(replica_id()), variables)

    def step():
        strategy.run(on_replica)

    (tf.function(step) if graph else step)()
