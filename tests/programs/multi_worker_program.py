"""What each process of four_processes_test.py runs, by `support/cluster.py`.

Each case asserts what a process can see alone, and returns what it holds.
"""

import glob
import os
import pathlib
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.programs import multi_worker_group_state
from tests.programs import multi_worker_ledger
from tests.programs import multi_worker_sharded
from tests.support import cluster
from tests.support import fitting
from tests.support import random_stacks
from tests.support import replicas
from tests.support import stacks
from tests.support import training

CROSSED = [[0, 2], [1, 3]]
NUM_WORKERS = 4
# Of random stacks: sharded in groups, and AGN in groups of groups; each with a
# loss scale.
SEEDS = (2, 58)


def values(variables):
    return [np.asarray(v.numpy(), np.float64).tolist() for v in variables]


def sums_of_groups(strategy):
    """Powers of ten, dense, sparse, and None on worker 2."""

    def gradients(r):
        rows = tf.IndexedSlices(
            tf.fill([r + 1, 2], 10.0**r),
            tf.fill([r + 1], 1),
            tf.constant([4, 2]),
        )
        return [
            tf.fill([3], 10.0**r),
            None if r == 2 else tf.constant(10.0**r),
            rows,
        ]

    rank = tf_xshard.rank(strategy)
    for groups, graph in (([[0, 1], [2, 3]], False), (CROSSED, True)):
        with strategy.scope():
            variables = [
                keras.Variable(np.zeros(shape), dtype="float32")
                for shape in ((3,), (), (4, 2))
            ]
            optimizer = tf_xshard.CrossShardOptimizer(
                keras.optimizers.SGD(1.0),
                "sum",
                groups,
                loss_normalization="replica",
                communication=multi_worker_sharded.COMMUNICATION,
            )
        replicas.apply_once(strategy, optimizer, gradients, variables, graph)
        [members] = [group for group in groups if rank in group]
        rows = sum((r + 1) * 10**r for r in members)
        assert values(variables) == [
            [-sum(10**r for r in members)] * 3,
            -sum(10**r for r in members if r != 2),
            [[0, 0], [-rows, -rows], [0, 0], [0, 0]],
        ]


def group_reduce(strategy):
    """Sums, and the sums of the gradients; worker 1 traces again by itself."""
    rank = tf_xshard.rank(strategy)

    def step(x):
        def on_replica():
            with tf.GradientTape() as tape:
                own = tf.constant(10.0**rank)
                tape.watch(own)
                total = tf_xshard.group_reduce(own, CROSSED, "sum")
                loss = (rank + 1) * total * tf.reduce_sum(x)
            return total, tape.gradient(loss, own)

        return strategy.run(on_replica)

    traced = tf.function(step, autograph=False)
    again = tf.ones([2]) / 2 if rank == 1 else tf.ones([1])
    expected = [1010, 6] if rank % 2 else [101, 4]
    for results in (step(tf.ones([1])), traced(tf.ones([1])), traced(again)):
        assert [float(one) for one in results] == expected


def rank_chief_and_barrier(strategy):
    """The chief is the last at the barrier, and all see what it wrote."""
    rank = tf_xshard.rank(strategy)
    assert rank == strategy.cluster_resolver.task_id
    assert tf_xshard.is_chief(strategy) == (rank == 0)
    time.sleep(0 if rank else 1.0)
    pathlib.Path(f"process_{rank}").touch()
    tf_xshard.barrier(strategy)
    assert len(glob.glob("process_*")) == NUM_WORKERS


def nesting(strategy):
    """Random nested optimizers of all kinds, with an overflow on a worker."""
    result = {}
    for seed in SEEDS:
        stack, gradients = random_stacks.random_case(seed, NUM_WORKERS)
        with strategy.scope():
            weight = keras.Variable(np.zeros(2, "float32"))
            optimizer = stacks.optimizer_of(stack)
            optimizer.build([weight])

        @tf.function(autograph=False)
        def step(arriving):
            def on_replica():
                gradient = arriving[replicas.replica_id()] / NUM_WORKERS
                optimizer.apply([optimizer.scale_loss(gradient)], [weight])

            strategy.run(on_replica)

        for arriving in gradients:
            step(tf.constant(arriving))
        [result[seed]] = values([weight])
    return result


def absent(strategy):
    """Worker 3 takes no part; the seconds that the others' barrier took."""
    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False, name="the_weight")
        model = keras.Sequential([keras.layers.Input([1]), dense])
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0),
            communication=tf_xshard.Communication(timeout_seconds=4),
        )
        model.compile(optimizer, "mse")
    if tf_xshard.rank(strategy) == 3:
        return 0.0

    def barrier():
        tf_xshard.barrier(strategy, timeout_seconds=4)

    missing = r"Worker 3 \(127\.0\.0\.1:\d+\)"
    took = []
    for call, text in (
        (
            lambda: replicas.apply_once(
                strategy, optimizer, lambda r: [tf.ones([1, 1])], [dense.kernel]
            ),
            f"{missing} did not say within 4 seconds .*the_weight",
        ),
        (
            lambda: tf_xshard.GroupState(model).divergence(),
            f"the state of groups: {missing} did not call this method within 4",
        ),
        # On a busy machine, another worker may not wait yet.
        (barrier, rf"different steps, probably .*{missing}\. "),
        (barrier, rf"different steps, probably .*{missing}\. "),
    ):
        began = time.monotonic()
        with pytest.raises((RuntimeError, tf.errors.OpError), match=text):
            call()
        took.append(time.monotonic() - began)
    # The next barrier does not wait again.
    assert took[-1] < 4
    return took[-2]


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)


def trained(strategy, groups):
    """A model after two epochs of `fit`, with momentum and clipping."""
    with strategy.scope():
        model = training.model()
        optimizer = tf_xshard.CrossShardOptimizer(
            momentum(), group_assignment=groups
        )
        model.compile(optimizer, "mse")
    with tf_xshard.multi_worker_fit():
        fitting.fit(model, [], 2, training.data(), training.BATCH_SIZE)
    return model


def fit_of_groups(strategy):
    return values(trained(strategy, CROSSED).trainable_variables)


def check_fit_of_groups(fits, groups):
    """Each group has one device's numbers of its shards, and no other group."""
    x, y = training.data()
    for members in groups:
        rows = np.arange(len(x)).reshape(-1, len(fits), 64 // len(fits))
        rows = rows[:, members].ravel()
        _, reference = training.train(
            momentum,
            xy=(x[rows], y[rows]),
            batch_size=64 // len(fits) * len(members),
            num_steps=8,
        )
        for rank, got in enumerate(fits):
            got = [[np.array(value)] for value in got]
            deviation = training.deviation(got, reference)
            assert (deviation <= 1e-6) == (rank in members), (rank, deviation)


CASES = (
    *(sums_of_groups, group_reduce, nesting, fit_of_groups),
    *(rank_chief_and_barrier, multi_worker_group_state.group_state),
    *(multi_worker_ledger.ledger, multi_worker_sharded.sharded),
    # The last: workers have traced different numbers of functions then.
    absent,
)


def main(directory):
    os.chdir(directory)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return cluster.attempted(CASES, strategy)
