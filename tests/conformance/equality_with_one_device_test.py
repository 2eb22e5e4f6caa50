"""Replicas, or those of a group, train as one device with their global batch.

The reference is plain Keras on one device, with the mean of the gradients.
"""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import steps
from tests.support import traced
from tests.support import training
from tests.support import versions

O = keras.optimizers  # noqa: E741
PAIRS = [[0, 3], [2, 1]]
GROUPS = {
    "two": [[0, 1]],
    "four": [[0, 1, 2, 3]],
    "pairs": PAIRS,
    "alone": [[0], [1], [2], [3]],
    "strided": [[0, 2, 4, 6], [1, 3, 5, 7]],
    # No power of two: the factor is not exact.
    "thirds": [[5, 0], [1, 3], [2, 4]],
}
SHAPES = [(4, 3), (3,)]
# Two updates of four accumulated gradients.
NUM_STEPS = 8
# Of the largest weight: the type's rounding, and XLA's square roots.
TOLERANCE = 2e-6


OPTIMIZERS = {
    "momentum": lambda: O.SGD(0.02, momentum=0.9),
    "adam": lambda: O.Adam(0.1),
    "adamw": lambda: O.AdamW(0.1, weight_decay=0.5),
    "clipnorm": lambda: O.SGD(0.2, momentum=0.9, clipnorm=0.5),
    "global_clipnorm": lambda: O.SGD(0.2, momentum=0.9, global_clipnorm=0.5),
    "clipvalue": lambda: O.SGD(0.2, momentum=0.9, clipvalue=0.5),
    "average": lambda: O.SGD(0.05, use_ema=True, ema_momentum=0.8),
    "overwritten": lambda: O.SGD(
        0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
    ),
    "accumulation": lambda: O.SGD(0.1, gradient_accumulation_steps=4),
    "schedule": lambda: O.SGD(
        O.schedules.ExponentialDecay(0.1, decay_steps=3, decay_rate=0.7)
    ),
    "loss_scale": lambda: O.LossScaleOptimizer(O.SGD(0.05)),
    "static_loss_scale": lambda: O.SGD(0.05, loss_scale_factor=64.0),
}
if hasattr(O, "MultiOptimizer"):  # Keras 3.12 has not.
    OPTIMIZERS["multi"] = lambda: O.MultiOptimizer(
        lambda variable: O.Adam(0.01) if variable.ndim == 2 else O.SGD(0.05)
    )
MADE = {O.Optimizer, *(type(make()) for make in OPTIMIZERS.values())}
RATES = {"Adadelta": 5.0, "RMSprop": 0.005, "Adagrad": 0.05, "Ftrl": 0.05}
# All others that this Keras has.
OPTIMIZERS |= {
    name: functools.partial(kind, RATES.get(name, 0.02))
    for name, kind in vars(O).items()
    if isinstance(kind, type) and issubclass(kind, O.Optimizer)
    if kind not in MADE
}


@functools.cache
def _gradients(num_replicas):
    """g_r of every step: small integers, larger from replica to replica."""
    rng = np.random.default_rng(0)
    return [
        np.moveaxis(
            rng.integers(-3, 4, size=[NUM_STEPS, *shape, num_replicas])
            * 3.0 ** np.arange(num_replicas),
            -1,
            1,
        )
        for shape in SHAPES
    ]


@functools.cache
def _one_device(
    name, num_replicas, members, wrap=lambda inner: inner, kind="none"
):
    """The weights of one device that gets the mean of some g_r."""
    one = traced.Traced(
        lambda: wrap(OPTIMIZERS[name]()),
        [np.ones(shape) for shape in SHAPES],
        kind,
        graph=False,
    )
    one.run(
        *(
            np.mean(own[:, list(members)], axis=1, keepdims=True)
            for own in _gradients(num_replicas)
        )
    )
    one.optimizer.finalize_variable_values(one.weights)
    return [weight[0] for weight in one.values()]


@pytest.mark.parametrize(
    "name, kind, groups, graph",
    [
        *replicas.in_turn(OPTIMIZERS, ["mirrored"], ["two"], [True]),
        ("adam", "multi_worker", "four", True),
        ("adam", "tpu", "four", True),
        ("accumulation", "tpu_permuted", "four", True),
        ("momentum", "mirrored", "pairs", False),
        ("overwritten", "mirrored", "pairs", True),
        ("average", "multi_worker", "pairs", True),
        ("average", "tpu", "pairs", True),
        ("average", "tpu_permuted", "pairs", True),
        ("global_clipnorm", "multi_worker", "pairs", False),
        ("global_clipnorm", "mirrored", "alone", True),
        ("global_clipnorm", "mirrored", "strided", True),
        ("global_clipnorm", "mirrored", "thirds", True),
    ],
)
def test_equal_to_one_device(name, kind, groups, graph):
    """The replicas of a group are equal, and the groups are different."""
    if name in versions.BROKEN:
        pytest.skip(f"this Keras's {name} fails on one device")
    groups = GROUPS[groups]
    is_one = len(groups) == 1
    num_replicas = sum(map(len, groups))
    one = traced.Traced(
        lambda: tf_xshard.CrossShardOptimizer(
            OPTIMIZERS[name](),
            group_assignment=None if is_one else groups,
            loss_normalization="global" if is_one else "replica",
        ),
        [np.ones(shape) for shape in SHAPES],
        kind,
        num_replicas,
        graph=graph,
    )
    divisor = num_replicas if is_one else 1
    one.run(*(each / divisor for each in _gradients(num_replicas)))
    one.optimizer.finalize_variable_values(one.weights)
    slots = [replicas.values(one.strategy, v) for v in one.optimizer.variables]
    expected = [
        _one_device(name, num_replicas, tuple(members)) for members in groups
    ]
    for members, wanted in zip(groups, expected, strict=True):
        for of_replicas in [*one.values(), *slots]:
            for r in members:
                np.testing.assert_array_equal(
                    of_replicas[r], of_replicas[members[0]]
                )
        for of_replicas, want in zip(one.values(), wanted, strict=True):
            error = np.abs(of_replicas[members[0]] - want).max()
            assert error <= TOLERANCE * np.abs(want).max(), error
            assert np.abs(want - 1).max() > 1e-2
    for first, second in itertools.pairwise(expected):
        assert np.abs(first[0] - second[0]).max() > 1e-2


@pytest.mark.parametrize("kind", ["none", "one_device"])
def test_one_replica_is_plain_keras(kind):
    args = "adam", 2, (0, 1)
    got = _one_device(*args, tf_xshard.CrossShardOptimizer, kind)
    for value, want in zip(got, _one_device(*args), strict=True):
        np.testing.assert_array_equal(value, want)


@pytest.mark.parametrize(
    "num_rows, per_replica, kind", [(15, 4, "mirrored"), (9, 1, "tpu_permuted")]
)
def test_fit_with_a_last_batch(num_rows, per_replica, kind):
    """Batches of 8 on 2 replicas: the last is 4 3, or 1 0.

    The oracle is the mean of the replicas' losses; Keras' loss of no rows is 0.
    """
    x, y = training.data(num_rows)
    make = lambda: O.SGD(0.05, use_ema=True, ema_momentum=0.5)
    _, got = training.train(
        lambda: tf_xshard.CrossShardOptimizer(make()),
        replicas.STRATEGIES[kind](2),
        (x, y),
        batch_size=8,
        num_steps=4,
        fit=True,
    )
    model, optimizer = training.model(), make()
    for start in (0, 8, 0, 8):
        size = per_replica if start else 4
        shards = [slice(first, first + size) for first in (start, start + size)]
        with tf.GradientTape() as tape:
            losses = [
                tf.reduce_mean(tf.square(model(x[rows]) - y[rows]))
                for rows in shards
                if len(x[rows])
            ]
            loss = tf.add_n(losses) / 2
        optimizer.apply(
            tape.gradient(loss, [v.value for v in model.trainable_variables]),
            model.trainable_variables,
        )
    optimizer.finalize_variable_values(model.trainable_variables)
    assert training.deviation(got, training.weights(model)) <= 1e-6


@versions.needs_multi_optimizer
def test_a_multi_optimizer_may_group_each_variable_otherwise():
    in_all, in_pairs = steps.stepped(
        lambda: O.MultiOptimizer(
            lambda variable: tf_xshard.CrossShardOptimizer(
                O.SGD(1.0), group_assignment=PAIRS if variable.ndim else None
            )
        ),
        lambda r: [tf.constant(10.0**r), tf.constant([10.0**r])],
        [0.0, [0.0]],
    )
    assert in_all == [-1111] * 4
    assert in_pairs == [-2002, -220, -220, -2002]
