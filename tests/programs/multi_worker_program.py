"""What each process of four_processes_test.py runs, by `support/cluster.py`.

`main` returns what this process's replica holds after each case.
"""

import functools
import os
import time

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tests.programs import multi_worker_group_state
from tests.programs import multi_worker_ledger
from tests.programs import multi_worker_sharded
from tests.support import fitting
from tests.support import random_stacks
from tests.support import replicas
from tests.support import stacks
from tests.support import training

GROUPS = {
    "all": None,
    "pairs": [[0, 1], [2, 3]],
    "crossed": [[0, 2], [1, 3]],
}
# `oracle` has all groups; the other cases, of these, go through the same.
CROSSED = GROUPS["crossed"]
PATIENCE_SECONDS = 120  # The machine may be busy.
NUM_WORKERS = 4
# Of random stacks: sharded in groups, and AGN in groups of groups; each with a
# loss scale.
SEEDS = (2, 58)


def _optimizer(groups):
    return tf_xshard.CrossShardOptimizer(
        keras.optimizers.SGD(1.0),
        "sum",
        groups,
        loss_normalization="replica",
        communication=tf_xshard.Communication(timeout_seconds=PATIENCE_SECONDS),
    )


def _values(variables):
    return [np.asarray(v.numpy(), np.float64).tolist() for v in variables]


# Of groups, and whether in a tf.function; the first needs --full.
ORACLE_CASES = replicas.in_turn(GROUPS, [True, False])


def oracle(strategy, full=True):
    """Powers of ten, dense, sparse, and None on worker 2."""
    result = {}
    for name, graph in ORACLE_CASES[0 if full else 1 :]:
        with strategy.scope():
            variables = [
                keras.Variable(np.zeros(shape), dtype="float32")
                for shape in ((3,), (), (4, 2))
            ]
            optimizer = _optimizer(GROUPS[name])

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

        replicas.apply_once(strategy, optimizer, gradients, variables, graph)
        result[name] = _values(variables)
    return result


def compat_v1(strategy):
    """TF1's optimizer with momentum, two steps; worker 2 lacks a gradient."""
    with strategy.scope():
        weight, other, step = (tf.Variable(0.0) for _ in range(3))
        optimizer = tf_xshard.compat.v1.CrossShardOptimizer(
            tf.compat.v1.train.MomentumOptimizer(1.0, 0.5),
            group_assignment=CROSSED,
        )
    rank = strategy.cluster_resolver.task_id

    def on_replica():
        def loss():
            both = weight * 10.0**rank
            return both if rank == 2 else both + other * 10.0**rank

        optimizer.minimize(loss, step, [weight, other])

    run = tf.function(lambda: strategy.run(on_replica), autograph=False)
    run()
    run()
    return _values([weight, other, step])


def retrace(strategy):
    """Worker 1 traces its step once more, by itself."""
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = _optimizer(GROUPS["pairs"])
    rank = strategy.cluster_resolver.task_id

    @tf.function(autograph=False)
    def step(x):
        strategy.run(
            lambda: optimizer.apply(
                [tf.reduce_sum(x) * 10.0 ** replicas.replica_id()], [weight]
            )
        )

    step(tf.ones([1]))
    step(tf.ones([2]) / 2 if rank == 1 else tf.ones([1]))
    step(tf.ones([1]))
    return _values([weight])


def group_reduce(strategy):
    """Sums and their gradients; worker 1 traces once more, by itself."""
    rank = strategy.cluster_resolver.task_id

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
    return [
        [float(one) for one in results]
        for results in (step(tf.ones([1])), traced(tf.ones([1])), traced(again))
    ]


def rows_of(rank, call):
    """A worker's rows, whose number differs by worker and call."""
    num_rows = (1, 2, 0, 5)[(rank + call) % NUM_WORKERS]
    x = np.arange(2 * num_rows, dtype="float32").reshape(num_rows, 2)
    x = np.sin(x + rank)
    return x, x[:, :1] - 2 * x[:, 1:] + 1


def linear_training(optimizer, loss, calls, strategy):
    """Trains y = x w; each call has the rows of this process."""
    with strategy.scope():
        kernel = keras.Variable(np.ones((2, 1)), dtype="float32")
        optimizer = optimizer()

    signature = [tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1])]

    @tf.function(autograph=False, input_signature=signature)
    def step(x, y):
        def on_replica():
            with tf.GradientTape() as tape:
                value = loss(y, x @ kernel)
            optimizer.apply([tape.gradient(value, kernel.value)], [kernel])

        strategy.run(on_replica)

    for x, y in calls:
        step(tf.constant(x), tf.constant(y))
    return np.ravel(kernel.numpy()).tolist()


def global_mean(strategy):
    """Uneven rows, with and without GlobalMean, and in a round of towers."""
    sgd = functools.partial(keras.optimizers.SGD, 0.1)
    rank = strategy.cluster_resolver.task_id
    calls = [rows_of(rank, call) for call in range(2)]
    mean = tf_xshard.GlobalMean("mse")
    return [
        linear_training(optimizer, loss, calls, strategy)
        for optimizer, loss in (
            (lambda: tf_xshard.CrossShardOptimizer(sgd()), mean),
            (
                lambda: tf_xshard.CrossShardOptimizer(sgd()),
                keras.losses.MeanSquaredError(),
            ),
            (lambda: tf_xshard.TowerOptimizer(sgd(), 2), mean),
        )
    ]


def skipped_steps(strategy):
    """Three steps; worker 2 has a nan in the second, which all skip."""
    with strategy.scope():
        weight = keras.Variable(np.zeros(3), dtype="float32")
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9),
            group_assignment=CROSSED,
            skip_nonfinite=True,
            loss_normalization="replica",
        )
        optimizer.build([weight])
    rank = strategy.cluster_resolver.task_id

    @tf.function(autograph=False)
    def step(number):
        is_bad = tf.logical_and(tf.equal(number, 2), rank == 2)
        factor = tf.where(is_bad, np.nan, tf.cast(number, tf.float32))
        strategy.run(
            lambda: optimizer.apply([tf.fill([3], factor * 10**rank)], [weight])
        )

    for number in (1, 2, 3):
        step(tf.constant(number))
    taken = int(optimizer.iterations.numpy())
    return [optimizer.skipped_steps, taken, *_values([weight])]


def local_variables(strategy):
    """Each worker's gradient is a power of ten."""
    with strategy.scope():
        shared, own = (keras.Variable(0.0, name=n) for n in ("shared", "own"))
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0),
            group_assignment=CROSSED,
            local="own",
            loss_normalization="replica",
        )
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [tf.constant(10.0**r)] * 2,
        [shared, own],
    )
    return _values([shared, own])


def processes(strategy, directory):
    """The chief is the last at the barrier, and all see what it wrote."""
    rank = tf_xshard.rank(strategy)
    time.sleep(0 if rank else 1.0)
    with open(os.path.join(directory, f"process_{rank}"), "w"):
        pass
    tf_xshard.barrier(strategy)
    found = [n for n in os.listdir(directory) if n.startswith("process_")]
    return [rank, tf_xshard.is_chief(strategy), len(found)]


def nesting(strategy, seeds):
    """Random nested optimizers of all kinds, with an overflow on a worker."""
    return {
        seed: _nested(strategy, *random_stacks.random_case(seed, NUM_WORKERS))
        for seed in seeds
    }


def _nested(strategy, stack, gradients):
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
    [values] = _values([weight])
    return values


def absent(strategy):
    """Worker 3 never traces the step, saves, nor calls a barrier."""
    seconds = 4
    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False, name="the_weight")
        model = keras.Sequential([keras.layers.Input([1]), dense])
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0),
            communication=tf_xshard.Communication(timeout_seconds=seconds),
        )
        model.compile(optimizer, "mse")
    if strategy.cluster_resolver.task_id == 3:
        return None
    errors = []
    for call in (
        lambda: replicas.apply_once(
            strategy, optimizer, lambda r: [tf.ones([1, 1])], [dense.kernel]
        ),
        lambda: tf_xshard.GroupState(model).divergence(),
        lambda: tf_xshard.barrier(strategy, timeout_seconds=seconds),
        lambda: tf_xshard.barrier(strategy, timeout_seconds=seconds),
    ):
        began = time.time()
        try:
            call()
        except (RuntimeError, tf.errors.OpError) as error:
            took = time.time() - began
            errors.append([type(error).__name__, str(error), took])
    return errors


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)


def fit_of_groups(strategy):
    """The weights after two epochs of `fit`, with momentum and clipping."""
    with strategy.scope():
        model = training.model()
        optimizer = tf_xshard.CrossShardOptimizer(
            momentum(), group_assignment=CROSSED
        )
        model.compile(optimizer, "mse")
    with tf_xshard.multi_worker_fit():
        fitting.fit(model, [], 2, training.data(), training.BATCH_SIZE)
    return _values(model.trainable_variables)


def main(directory, *options):
    """All cases; `--full` has more of them."""
    full = "--full" in options
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    own = (
        *(compat_v1, retrace, group_reduce, global_mean),
        *(skipped_steps, local_variables, fit_of_groups),
    )
    return {
        **{case.__name__: case(strategy) for case in own},
        "oracle": oracle(strategy, full),
        "processes": processes(strategy, directory),
        "nesting": nesting(strategy, (*SEEDS, *range(13 * full))),
        "group_state": multi_worker_group_state.run(strategy, directory, full),
        "ledger": multi_worker_ledger.run(strategy, full),
        "sharded": multi_worker_sharded.run(strategy, directory, full),
        # The last: workers have traced different numbers of functions then.
        "absent": absent(strategy),
    }
