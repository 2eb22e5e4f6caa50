"""What each process of four_processes_test.py runs.

`python -m tests.programs.multi_worker_program CASE [DIRECTORY] [--full]`, with
TF_CONFIG set. Prints one JSON line with what this process's replica holds.
"""

import json
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tests.programs import multi_worker_fit_cases
from tests.programs import multi_worker_group_state
from tests.programs import multi_worker_ledger
from tests.programs import multi_worker_sharded
from tests.support import agn_oracle
from tests.support import counting
from tests.support import random_stacks
from tests.support import replicas
from tests.support import stacks

GROUPS = {
    "all": None,
    "pairs": [[0, 1], [2, 3]],
    "crossed": [[0, 2], [1, 3]],
}
# `oracle` has all groups; the other cases, of these, go through the same.
CROSSED = GROUPS["crossed"]
FULL = "--full" in sys.argv
TIMEOUT_SECONDS = 15  # Where a worker is killed.
PATIENCE_SECONDS = 120  # Elsewhere: the machine may be busy.
KILLED_AT_STEP = 20
NUM_WORKERS = 4
NUM_FLOATS = 1 << 20


def _optimizer(groups, inner=None, timeout_seconds=PATIENCE_SECONDS, **kwargs):
    return tf_xshard.CrossShardOptimizer(
        inner or keras.optimizers.SGD(1.0),
        "sum",
        groups,
        loss_normalization="replica",
        communication=tf_xshard.Communication(timeout_seconds=timeout_seconds),
        **kwargs,
    )


def _values(variables):
    return [np.asarray(v.numpy(), np.float64).tolist() for v in variables]


def oracle(strategy):
    """Powers of ten, dense, sparse, and None on worker 2."""
    result = {}
    for name, groups in GROUPS.items():
        for graph in (True, False):
            with strategy.scope():
                variables = [
                    keras.Variable(np.zeros(shape), dtype="float32")
                    for shape in ((3,), (), (4, 2))
                ]
                optimizer = _optimizer(groups)

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

            replicas.apply_once(
                strategy, optimizer, gradients, variables, graph
            )
            key = f"{name}/{'function' if graph else 'eager'}"
            result[key] = _values(variables)
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


def loss_scale(strategy):
    """An overflow on worker 1, groups of two: all skip."""
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = _optimizer(
            GROUPS["pairs"],
            keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(1.0), initial_scale=8.0
            ),
        )
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [tf.constant(np.inf if r == 1 else 1.0)],
        [weight],
    )
    return _values([weight, optimizer.inner_optimizer.dynamic_scale])


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


def training(strategy):
    """A custom training loop on this worker's part of each batch."""
    from tests.support import training as training_lib

    x, y = training_lib.data()
    with strategy.scope():
        model = training_lib.model()
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.Adam(0.01, global_clipnorm=0.5),
            group_assignment=GROUPS["crossed"],
        )
    loss_fn = keras.losses.MeanSquaredError()

    @tf.function(autograph=False)
    def step(x, y):
        def on_replica(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(
                zip(gradients, model.trainable_variables, strict=True)
            )

        strategy.run(on_replica, args=(x, y))

    rank, per_worker = strategy.cluster_resolver.task_id, 16
    for index in range(training_lib.NUM_STEPS):
        start = index * 64 % len(x) + rank * per_worker
        step(x[start : start + per_worker], y[start : start + per_worker])
    return _values(model.trainable_variables)


def towers(strategy):
    """Two rounds of three towers: powers of ten that tell call and worker."""
    with strategy.scope():
        variables = [
            keras.Variable(np.zeros(shape), dtype="float64")
            for shape in ((2,), (), (4, 2))
        ]
        optimizer = tf_xshard.TowerOptimizer(_optimizer(CROSSED), 3, "sum")
        optimizer.build(variables)

    @tf.function(autograph=False)
    def step(call):
        def on_replica():
            r = replicas.replica_id()
            value = 10.0 ** (tf.cast(r + 4 * call, tf.float64))
            rows = tf.IndexedSlices(
                tf.fill([2, 2], value),
                tf.stack([1, call]),
                tf.constant([4, 2]),
            )
            dense = tf.fill([2], value)
            optimizer.apply([dense, None if r == 2 else value, rows], variables)

        strategy.run(on_replica)

    values = []
    for call in range(6):
        step(tf.constant(call % 3))
        values.append(_values(variables))
    return values


def agn(strategy):
    """Three exchanges of three steps each."""
    result = {}
    for inner, (_, make) in agn_oracle.OPTIMIZERS.items():
        with strategy.scope():
            weight = keras.Variable([10.0, -2.0])
            optimizer = tf_xshard.AGNOptimizer(
                make(),
                NUM_WORKERS,
                communication_period=3,
                group_assignment=CROSSED,
                loss_normalization="replica",
            )
            optimizer.build([weight])

        @tf.function(autograph=False)
        def step(gradient):
            strategy.run(lambda: optimizer.apply([gradient], [weight]))

        values = []
        for number in range(1, 10):
            gradient = agn_oracle.gradient(
                strategy.cluster_resolver.task_id, number
            )
            step(tf.constant(gradient, tf.float32))
            values.append(_values([weight, optimizer.center_variables[0]]))
        result[inner] = values
    return result


def wire(strategy):
    """Bytes that the cluster sends around each of four calls, four times.

    One group of all, whose sum also keeps the workers together.
    """
    result = {}
    for name, make in {
        "towers": lambda: tf_xshard.TowerOptimizer(_optimizer(None), 4),
        "agn": lambda: tf_xshard.AGNOptimizer(
            keras.optimizers.SGD(1.0), communication_period=4
        ),
    }.items():
        with strategy.scope():
            weight = keras.Variable(np.zeros(NUM_FLOATS), dtype="float32")
            optimizer = make()
            optimizer.build([weight])

        @tf.function(autograph=False)
        def step():
            strategy.run(
                lambda: optimizer.apply([tf.ones([NUM_FLOATS])], [weight])
            )

        for _ in range(4):
            step()
        sent = np.zeros([4, 4])
        for call in range(16):
            before = counting.loopback_bytes()
            step()
            # The others may be later than this one.
            tf_xshard.barrier(strategy)
            time.sleep(0.1)
            sent[call // 4, call % 4] = counting.loopback_bytes() - before
        result[name] = sent.tolist()
    return result


def processes(strategy):
    """The chief is the last at the barrier, and all see what it wrote."""
    rank = tf_xshard.rank(strategy)
    time.sleep(0 if rank else 1.0)
    with open(os.path.join(sys.argv[2], f"process_{rank}"), "w"):
        pass
    tf_xshard.barrier(strategy)
    found = [n for n in os.listdir(sys.argv[2]) if n.startswith("process_")]
    return [rank, tf_xshard.is_chief(strategy), len(found)]


def nesting(strategy):
    """Random nested optimizers, each with a few steps."""
    return [
        _nested(strategy, *random_stacks.random_case(seed, NUM_WORKERS))
        for seed in range(60 if FULL else 6)
    ]


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
    """Worker 3 never traces the step, nor calls a barrier."""
    with strategy.scope():
        weight = keras.Variable(0.0, name="the_weight")
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(1.0),
            communication=tf_xshard.Communication(timeout_seconds=3),
        )
    if strategy.cluster_resolver.task_id == 3:
        time.sleep(13)
        return None
    errors = []
    for call in (
        lambda: replicas.apply_once(
            strategy, optimizer, lambda r: [tf.constant(1.0)], [weight]
        ),
        lambda: tf_xshard.barrier(strategy, timeout_seconds=3),
        lambda: tf_xshard.barrier(strategy, timeout_seconds=3),
    ):
        began = time.time()
        try:
            call()
        except (RuntimeError, tf.errors.OpError) as error:
            seconds = time.time() - began
            errors.append([type(error).__name__, str(error), seconds])
    # Others that are later still wait, and would see this process end.
    time.sleep(3)
    return errors


def _as_users_have_it(case, *arguments):
    """With TensorFlow's graph optimizer, which takes time in small cases."""
    _optimize_graphs(True)
    try:
        return case(*arguments)
    finally:
        _optimize_graphs(False)


def _optimize_graphs(is_on):
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": not is_on}
    )


def cases(strategy):
    fits = _as_users_have_it(multi_worker_fit_cases.run, strategy)
    # The other cases of `fit` are about something else than its input.
    return {
        "oracle": _as_users_have_it(oracle, strategy),
        "compat_v1": compat_v1(strategy),
        "loss_scale": loss_scale(strategy),
        "retrace": retrace(strategy),
        "training": _as_users_have_it(training, strategy),
        "towers": towers(strategy),
        "agn": agn(strategy),
        "wire": wire(strategy),
        "processes": processes(strategy),
        "nesting": nesting(strategy),
        "fit": fits,
        "group_state": multi_worker_group_state.run(strategy, sys.argv[2]),
        "ledger": multi_worker_ledger.run(strategy),
        "sharded": multi_worker_sharded.run(strategy, sys.argv[2]),
        # The last: workers have traced different numbers of functions then.
        "absent": absent(strategy),
    }


def killed(strategy):
    """Worker 3 dies in the middle of `fit`."""
    from tests.support import training as training_lib

    class _Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if (
                batch == KILLED_AT_STEP
                and strategy.cluster_resolver.task_id == 3
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)

    communication = tf_xshard.Communication(timeout_seconds=TIMEOUT_SECONDS)
    with strategy.scope():
        model = training_lib.model()
        model.compile(
            optimizer=tf_xshard.CrossShardOptimizer(
                keras.optimizers.SGD(0.01),
                group_assignment=GROUPS["crossed"],
                communication=communication,
            ),
            loss="mse",
        )
    dataset = tf.data.Dataset.from_tensor_slices(training_lib.data())
    with tf_xshard.multi_worker_fit(communication):
        model.fit(
            dataset.repeat().batch(64),
            steps_per_epoch=100_000,
            shuffle=False,
            verbose=0,
            callbacks=[_Kill()],
        )


if __name__ == "__main__":
    _optimize_graphs(False)
    made = tf.distribute.MultiWorkerMirroredStrategy()
    print(json.dumps(globals()[sys.argv[1]](made)), flush=True)
    # The peers may be gone; leaving in order would wait for them.
    os._exit(0)
