"""Strategies over logical devices, and the values that every replica holds."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_xshard import testing
from tf_xshard.private.keras import shards as keras_shards

# GPUs are visible with `--gpu` only.
KIND = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
# Between two runs of one computation: on a GPU, cuBLAS chooses its algorithms
# by their time.
REPEATED = 0.0 if KIND == "CPU" else 1e-6


# Away from those of MirroredStrategy.
tf.distribute.MultiWorkerMirroredStrategy._collective_key_base = 1_000_000_000


def set_up_cpus(number):
    """Makes logical CPUs, of a process in which TensorFlow has not run."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * number,
    )


def use_new_keys():
    """Keeps the strategies that are made from now on apart from all others.

    TensorFlow's own collectives of two strategies in one process would meet
    under one key ("Shape mismatch in the collective instance 100").
    """
    tf.distribute.MirroredStrategy._collective_key_base += 100_000
    tf.distribute.MultiWorkerMirroredStrategy._collective_key_base += 100_000


@functools.cache
def mirrored(
    num_replicas: int, kind: str = KIND
) -> tf.distribute.MirroredStrategy:
    """One strategy per number of replicas, shared by all tests."""
    return mirrored_on(tuple(range(num_replicas)), kind)


@functools.cache
def mirrored_on(
    devices: tuple[int, ...], kind: str = KIND
) -> tf.distribute.MirroredStrategy:
    """Replica r is on the logical device of number `devices[r]`."""
    use_new_keys()
    return tf.distribute.MirroredStrategy(
        [f"{kind}:{device}" for device in devices]
    )


# Devices in another order than the replicas. Sorted as strings, MIXED's names
# would have a third order.
REVERSED = (3, 2, 1, 0)
MIXED = (10, 2, 11, 1)
TWELVE = (11, 3, 7, 0, 10, 5, 1, 9, 2, 8, 4, 6)


@functools.cache
def tpu(num_replicas: int) -> tf.distribute.TPUStrategy:
    """A simulated TPU (XLA:CPU) with a device assignment."""
    return testing.simulated_tpu_strategy(num_replicas)


@functools.cache
def tpu_permuted(num_replicas: int) -> tf.distribute.TPUStrategy:
    """One without, whose XLA numbering is not the strategy's."""
    permutation = [(3 * r + 1) % num_replicas for r in range(num_replicas)]
    if num_replicas % 3 == 0:
        permutation = [*range(1, num_replicas), 0]
    return testing.simulated_tpu_strategy(
        num_replicas,
        device_assignment=False,
        replica_permutation=permutation,
    )


@functools.cache
def multi_worker(
    num_replicas: int,
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """All replicas of one worker, this process."""
    use_new_keys()
    return tf.distribute.MultiWorkerMirroredStrategy._from_local_devices(
        [f"/device:{KIND}:{device}" for device in range(num_replicas)]
    )


# Every path of the wrappers' numbers: a TPU's without and with an XLA numbering
# that is not the strategy's.
STRATEGIES = {
    "mirrored": mirrored,
    "multi_worker": multi_worker,
    "tpu": tpu,
    "tpu_permuted": tpu_permuted,
}
TPUS = ("tpu", "tpu_permuted")
WITH_ONE_DEVICE = {
    **STRATEGIES,
    "none": lambda _: tf.distribute.get_strategy(),
    "one_device": lambda _: tf.distribute.OneDeviceStrategy("CPU:0"),
}
in_full = pytest.mark.full
# What does not depend on the numbering.
on_mirrored_and_tpu = pytest.mark.parametrize("kind", ["mirrored", "tpu"])
on_mirrored_and_permuted = pytest.mark.parametrize(
    "kind", ["mirrored", "tpu_permuted"]
)


def in_turn(values, *others):
    """Each value with the next one of every other list, which repeat."""
    return [
        (value, *(other[index % len(other)] for other in others))
        for index, value in enumerate(values)
    ]


def pairwise(*dimensions):
    """A few of the product's cases, among them every pair of two values.

    A defect nearly always takes one setting or the combination of two, and the
    product grows with every dimension.
    """

    def pairs(case):
        return set(itertools.combinations(enumerate(case), 2))

    product = list(itertools.product(*dimensions))
    missing, cases = set().union(*map(pairs, product)), []
    while missing:
        cases.append(max(product, key=lambda case: len(missing & pairs(case))))
        missing -= pairs(cases[-1])
    return cases


def is_tpu(strategy) -> bool:
    return isinstance(strategy, tf.distribute.TPUStrategy)


def values(strategy, variable) -> list[np.ndarray]:
    """A variable's value on every replica, in the order of replica ids."""
    if strategy and isinstance(variable, keras_shards.Sharded):
        return variable.store.of_local_replicas(variable)
    tensor = (
        variable.value if isinstance(variable, keras.Variable) else variable
    )
    strategy = strategy or tf.distribute.get_strategy()
    return [
        np.asarray(one) for one in strategy.experimental_local_results(tensor)
    ]


def replica_id() -> int:
    """This replica's id, in replica context."""
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def replica_id_tensor() -> tf.Tensor:
    """The same where one program is traced for all replicas."""
    context = tf.distribute.get_replica_context()
    return tf.convert_to_tensor(context.replica_id_in_sync_group)


def power_of_ten() -> tf.Tensor:
    """10^r on replica r: a sum of these names its members."""
    return tf.gather(
        tf.constant(10.0 ** np.arange(8), tf.float32), replica_id_tensor()
    )


def apply_once(strategy, optimizer, gradients_of, variables, graph=True):
    """Applies `gradients_of(replica_id)` on every replica."""
    if is_tpu(strategy):
        _apply_once_on_tpu(strategy, optimizer, gradients_of, variables)
    else:
        applying(strategy, optimizer, gradients_of, variables, graph)()


def applying(strategy, optimizer, gradients_of, variables, graph=True):
    """A function that does so, each time it is called."""

    def on_replica():
        optimizer.apply(gradients_of(replica_id()), variables)

    def step():
        strategy.run(on_replica)

    return tf.function(step, autograph=False) if graph else step


def _apply_once_on_tpu(strategy, optimizer, gradients_of, variables):
    """A TPU has one program for all replicas, in which each takes its own.

    Hence a gradient is None, or has its number of rows, on all replicas.
    """
    of_replicas = [
        gradients_of(r) for r in range(strategy.num_replicas_in_sync)
    ]
    # Of IndexedSlices, each part.
    flat = [tf.nest.flatten(one, expand_composites=True) for one in of_replicas]
    stacks = [
        None if own[0] is None else tf.stack(own)
        for own in zip(*flat, strict=True)
    ]

    def on_replica():
        own = [
            one if one is None else one[replica_id_tensor()] for one in stacks
        ]
        optimizer.apply(
            tf.nest.pack_sequence_as(
                of_replicas[0], own, expand_composites=True
            ),
            variables,
        )

    tf.function(lambda: strategy.run(on_replica), autograph=False)()


def run(kind, function, num_replicas=4, value=None):
    """Runs `function(10^r)` on replica r; the results as nested lists."""
    strategy = STRATEGIES[kind](num_replicas)
    arguments = strategy.experimental_distribute_values_from_function(
        value or (lambda c: tf.fill([2], 10.0**c.replica_id_in_sync_group))
    )

    @tf.function(autograph=False)
    def step(x):
        return strategy.run(function, args=(x,))

    return tf.nest.map_structure(
        lambda result: [
            one.numpy().tolist()
            for one in strategy.experimental_local_results(result)
        ],
        step(arguments),
    )
