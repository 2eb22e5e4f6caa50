"""README's table of what plain Keras fails under MirroredStrategy.

`python -m tests.programs.plain_keras_cases` runs plain Keras, and fails if it
does anything else than the table says. Each case is a process of its own: a
collective that fails aborts those of every later case.
`tests/conformance/plain_keras_test.py` runs the same cases with a wrapper.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from tests.support import processes
from tests.support import replicas
from tests.support import versions

NUM_REPLICAS = 2
_MERGE_CALL = "`merge_call` called while defining a new graph or a tf.function"
_PLACEHOLDER = "You must feed a value for placeholder tensor"
_INF = float("inf")
SGD = functools.partial(keras.optimizers.SGD, 1.0)


class Case(NamedTuple):
    """Steps of an optimizer on variables of ones.

    Attributes:
      optimizer: Makes the optimizer.
      gradients: The gradients of replica r, whether it is the first step, and
        the optimizer. `fit` divides the loss by the number of replicas, and so
        do these.
      plain: The error of plain Keras, or what it gives for the first variable.
      right: The right values of each variable, worked out by hand.
      steps: How many.
      is_built: Whether the optimizer is built before the first step.
      in_cond: Whether each second step is left out, by tf.cond.
    """

    optimizer: Callable
    gradients: Callable
    plain: str | float | list
    right: Sequence
    steps: int = 1
    is_built: bool = True
    in_cond: bool = False


def _mean(r, first, optimizer):
    """2 r on replica r, whose mean is 1."""
    return [tf.constant(2.0 * r) / NUM_REPLICAS]


def _overflow(r, first, optimizer):
    """The last replica overflows in the first of two steps."""
    gradient = optimizer.scale_loss(tf.constant(1.0)) / NUM_REPLICAS
    return [tf.where(first, _INF, gradient) if r else gradient]


def _none_on_replica_1(r, first, optimizer):
    four = tf.constant(4.0) / NUM_REPLICAS
    return [tf.constant(1.0) / NUM_REPLICAS, None if r == 1 else four]


def _row_0_twice(r, first, optimizer, factor=0.0):
    values = tf.fill([2, 1], (1.0 + factor * r) / NUM_REPLICAS)
    return [tf.IndexedSlices(values, tf.constant([0, 0]), tf.constant([2, 1]))]


_ACCUMULATING = functools.partial(SGD, gradient_accumulation_steps=2)
_MOMENTUM = functools.partial(SGD, momentum=0.5)
CASES = {
    "accumulation": Case(_ACCUMULATING, _mean, _MERGE_CALL, [1 - 2], steps=4),
    # 0 and -1.5, averaged with momentum 0.5.
    "ema_overwrite": Case(
        functools.partial(
            SGD, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
        ),
        _mean,
        _MERGE_CALL,
        [-0.5],
        steps=2,
    ),
    # Velocities -1 and -1.5.
    "unbuilt": Case(
        _MOMENTUM, _mean, _PLACEHOLDER, [1 - 2.5], steps=2, is_built=False
    ),
    "in_cond": Case(
        _MOMENTUM, _mean, _MERGE_CALL, [1 - 2.5], steps=3, in_cond=True
    ),
    # The first step is skipped, the second has gradient 1.
    "overflow": Case(
        lambda: keras.optimizers.LossScaleOptimizer(SGD(), initial_scale=8.0),
        _overflow,
        -_INF,
        [0.0],
        steps=2,
    ),
    # A gradient of 40 is clipped to 1; plain Keras clips two of 20 to 1 each.
    "clipping": Case(
        functools.partial(SGD, clipnorm=1.0),
        lambda *_: [tf.constant(40.0) / NUM_REPLICAS],
        -1.0,
        [0.0],
    ),
    # 4 and none: the divisor stays 2.
    "none_on_one_replica": Case(
        SGD,
        _none_on_replica_1,
        "Values to regroup had different lengths",
        [1 - 1.0, 1 - 2.0],
    ),
    # Row 0 gets 2 + 2 r on replica r, mean 3, accumulated over two steps.
    "sparse_accumulation": Case(
        _ACCUMULATING,
        functools.partial(_row_0_twice, factor=1.0),
        _MERGE_CALL,
        [[[1 - 3.0], [1.0]]],
        steps=2,
    ),
    # Adam's first step is the learning rate, whatever the gradient.
    "duplicate_indices": Case(
        lambda: keras.optimizers.Adam(0.5),
        _row_0_twice,
        [[0.0], [1.0]],
        [[[0.5], [1.0]]],
    ),
    # Of `fit`: see `_fit`. Loss (w - 1)^2 from w = 0: 0.5, then 0.75.
    "steps_per_execution": Case(
        lambda: keras.optimizers.SGD(0.25), None, _PLACEHOLDER, [[[0.75]]]
    ),
}
# The version of Keras from which on it does not fail.
MENDED = {"ema_overwrite": (3, 16), "unbuilt": (3, 16)}


def _fit(case, wrap, strategy):
    with strategy.scope():
        dense = keras.layers.Dense(
            1, use_bias=False, kernel_initializer="zeros"
        )
        model = keras.Sequential([keras.layers.Input((1,)), dense])
        model.compile(wrap(case.optimizer()), "mse", steps_per_execution=2)
    x = np.ones([16, 1], np.float32)
    model.fit(x, x, batch_size=8, verbose=0, shuffle=False)
    return model.trainable_variables


def _steps(case, wrap, strategy):
    with strategy.scope():
        optimizer = wrap(case.optimizer())
        weights = [
            keras.Variable(np.ones_like(right, "float32"), name=f"weight_{i}")
            for i, right in enumerate(case.right)
        ]
        if case.is_built:
            optimizer.build(weights)

    def apply(first):
        r = replicas.replica_id()
        optimizer.apply(case.gradients(r, first, optimizer), weights)
        return 0

    def on_replica(first, due):
        if case.in_cond:
            return tf.cond(due, lambda: apply(first), lambda: 0)
        return apply(first)

    step = tf.function(
        lambda *arguments: strategy.run(on_replica, arguments), autograph=False
    )
    for number in range(case.steps):
        step(tf.constant(number == 0), tf.constant(number % 2 == 0))
    return weights


def values(name, wrap):
    """Each variable's value on every replica, at the end of a case."""
    case, strategy = CASES[name], replicas.mirrored(NUM_REPLICAS)
    run = _steps if case.gradients else _fit
    return [
        np.float64(replicas.values(strategy, weight)).tolist()
        for weight in run(case, wrap, strategy)
    ]


def is_right(name, found):
    """Whether all replicas hold the right values of all variables."""
    return all(
        len(of_replicas) == NUM_REPLICAS
        and np.allclose(of_replicas, right, atol=1e-5)
        for of_replicas, right in zip(found, CASES[name].right, strict=True)
    )


def _run_alone(name):
    """Prints what plain Keras does, in a process that has done nothing else."""
    replicas.set_up_cpus(NUM_REPLICAS)
    try:
        outcome = values(name, lambda optimizer: optimizer)
    except Exception as error:  # The error's text is the result.
        outcome = f"{type(error).__name__}: {error}"
    print(json.dumps(outcome))


def _is_as_the_table_says(name, outcome):
    plain = CASES[name].plain
    if versions.KERAS >= MENDED.get(name, (4, 0)):
        return not isinstance(outcome, str) and is_right(name, outcome)
    if isinstance(plain, str) or isinstance(outcome, str):
        return str(plain) in outcome
    return np.allclose(outcome[0], plain, atol=1e-4)


def main():
    wrong = []
    for name in CASES:
        command = processes.python("-m", __spec__.name, name)
        ended = processes.run(command, check=True)
        outcome = json.loads(ended.stdout.strip().splitlines()[-1])
        print(f"{name}: {str(outcome)[:200]}", flush=True)
        if not _is_as_the_table_says(name, outcome):
            wrong.append(name)
    print(f"Not as the table says, with Keras {keras.__version__}: {wrong}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _run_alone(sys.argv[1])
    else:
        main()
