"""What plain Keras does under MirroredStrategy, one case a process.

`python -m tests.programs.plain_keras_cases CASE` prints one JSON line: the
values that replicas hold, or the error's text. A failing collective aborts all
that follow in a process, hence the processes.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

NUM_REPLICAS = 4


def _own_devices():
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * NUM_REPLICAS,
    )


def _setup(optimizer_fn, wrap, shape=(), dtype="float32"):
    """A variable of ones and its optimizer, in the scope of a strategy."""
    import keras

    from tests.support import replicas

    strategy = replicas.mirrored(NUM_REPLICAS)
    with strategy.scope():
        weight = keras.Variable(np.ones(shape), dtype=dtype, name="weight")
        optimizer = wrap(optimizer_fn())
    return strategy, weight, optimizer


def _run(strategy, optimizer, gradient_of, variables, steps=1, build=True):
    from tests.support import replicas

    if build:
        with strategy.scope():
            optimizer.build(variables)

    @tf.function
    def step():
        strategy.run(
            lambda: optimizer.apply(
                gradient_of(replicas.replica_id()), variables
            )
        )

    for _ in range(steps):
        step()
    return [
        [
            np.asarray(v, np.float64).tolist()
            for v in replicas.values(strategy, w)
        ]
        for w in variables
    ]


def _mean_gradient(r):
    """g_r = r, as it arrives: divided by the number of replicas. Mean: 1.5."""
    return [tf.constant(float(r)) / NUM_REPLICAS]


def accumulation(wrap):
    import keras

    strategy, weight, optimizer = _setup(
        lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), wrap
    )
    return _run(strategy, optimizer, _mean_gradient, [weight], steps=4)


def ema_overwrite(wrap):
    import keras

    strategy, weight, optimizer = _setup(
        lambda: keras.optimizers.SGD(
            1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
        ),
        wrap,
    )
    return _run(strategy, optimizer, _mean_gradient, [weight], steps=2)


def steps_per_execution(wrap):
    import keras

    from tests.support import replicas

    strategy = replicas.mirrored(NUM_REPLICAS)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((1,)),
                keras.layers.Dense(
                    1, use_bias=False, kernel_initializer="zeros"
                ),
            ]
        )
        model.compile(
            optimizer=wrap(keras.optimizers.SGD(0.25)),
            loss="mse",
            steps_per_execution=2,
        )
    x = np.ones([16, 1], np.float32)
    model.fit(x, x, batch_size=8, verbose=0, shuffle=False)
    return [
        [
            np.asarray(v, np.float64).tolist()
            for v in replicas.values(strategy, model.trainable_variables[0])
        ]
    ]


def unbuilt(wrap):
    import keras

    strategy, weight, optimizer = _setup(
        lambda: keras.optimizers.SGD(1.0, momentum=0.5), wrap
    )
    return _run(
        strategy, optimizer, _mean_gradient, [weight], steps=2, build=False
    )


def overflow(wrap):
    """Replica 2 overflows in the first of two steps."""
    import keras

    from tests.support import replicas

    strategy, weight, optimizer = _setup(
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=8.0
        ),
        wrap,
    )
    with strategy.scope():
        optimizer.build([weight])

    @tf.function
    def step(bad):
        def on_replica():
            r = replicas.replica_id()
            gradient = optimizer.scale_loss(tf.constant(1.0)) / NUM_REPLICAS
            if r == 2:
                gradient = tf.where(bad, np.inf, gradient)
            optimizer.apply([gradient], [weight])

        strategy.run(on_replica)

    step(tf.constant(True))
    step(tf.constant(False))
    return [
        [
            np.asarray(v, np.float64).tolist()
            for v in replicas.values(strategy, weight)
        ]
    ]


def clipping(wrap):
    import keras

    strategy, weight, optimizer = _setup(
        lambda: keras.optimizers.SGD(1.0, clipnorm=1.0), wrap
    )
    return _run(
        strategy,
        optimizer,
        lambda r: [tf.constant(40.0) / NUM_REPLICAS],
        [weight],
    )


def none_on_one_replica(wrap):
    import keras

    from tests.support import replicas

    strategy = replicas.mirrored(NUM_REPLICAS)
    with strategy.scope():
        first = keras.Variable(1.0, name="first")
        second = keras.Variable(1.0, name="second")
        optimizer = wrap(keras.optimizers.SGD(1.0))
    return _run(
        strategy,
        optimizer,
        lambda r: [
            tf.constant(1.0) / NUM_REPLICAS,
            None if r == 1 else tf.constant(4.0) / NUM_REPLICAS,
        ],
        [first, second],
    )


def _slices(r):
    return [
        tf.IndexedSlices(
            tf.fill([2, 1], float(r) / NUM_REPLICAS),
            tf.constant([0, 0]),
            tf.constant([2, 1]),
        )
    ]


def sparse_accumulation(wrap):
    import keras

    strategy, table, optimizer = _setup(
        lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2),
        wrap,
        shape=(2, 1),
    )
    return _run(strategy, optimizer, _slices, [table], steps=2)


def duplicate_indices(wrap):
    import keras

    strategy, table, optimizer = _setup(
        lambda: keras.optimizers.Adam(0.5), wrap, shape=(2, 1)
    )
    return _run(
        strategy,
        optimizer,
        lambda r: [
            tf.IndexedSlices(
                tf.fill([2, 1], 1.0 / NUM_REPLICAS),
                tf.constant([0, 0]),
                tf.constant([2, 1]),
            ),
        ],
        [table],
    )


def in_cond(wrap):
    import keras

    from tests.support import replicas

    strategy, weight, optimizer = _setup(
        lambda: keras.optimizers.SGD(1.0, momentum=0.5), wrap
    )
    with strategy.scope():
        optimizer.build([weight])

    @tf.function
    def step(due):
        def on_replica():
            def apply():
                optimizer.apply(_mean_gradient(replicas.replica_id()), [weight])
                return 1

            tf.cond(due, apply, lambda: 0)

        strategy.run(on_replica)

    for due in (True, False, True):
        step(tf.constant(due))
    return [
        [
            np.asarray(v, np.float64).tolist()
            for v in replicas.values(strategy, weight)
        ]
    ]


CASES = {
    function.__name__: function
    for function in (
        accumulation,
        ema_overwrite,
        steps_per_execution,
        unbuilt,
        overflow,
        clipping,
        none_on_one_replica,
        sparse_accumulation,
        duplicate_indices,
        in_cond,
    )
}


def outcome(case, wrap) -> dict:
    """What a case ends with: values of each variable on each replica, or the
    error."""
    try:
        return {"values": CASES[case](wrap)}
    except Exception as error:  # The error's text is the result here.
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    _own_devices()
    print(json.dumps(outcome(sys.argv[1], lambda optimizer: optimizer)))
