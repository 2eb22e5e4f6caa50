"""Where a step may be: functions, conditionals, loops, orders of calls."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import steps

SGD = keras.optimizers.SGD
PAIRS = [[0, 1], [2, 3]]
_gradient = replicas.power_of_ten


def _setup(inner=lambda: SGD(1.0), num_variables=1, kind="mirrored"):
    """Variables of four replicas, and their optimizer, in pairs."""
    strategy = replicas.STRATEGIES[kind](4)
    with strategy.scope():
        variables = [keras.Variable(0.0) for _ in range(num_variables)]
        return strategy, variables, _summing(inner(), PAIRS)


def _summing(inner, groups):
    return tf_xshard.CrossShardOptimizer(
        inner, "sum", groups, loss_normalization="replica"
    )


def _step(strategy, on_replica):
    return tf.function(
        lambda *args: strategy.run(on_replica, args), autograph=False
    )


@pytest.mark.parametrize(
    "kind, is_eager",
    [
        *itertools.product(["mirrored", "multi_worker"], [False, True]),
        ("tpu", False),
    ],
)
def test_unbuilt_on_first_use(kind, is_eager):
    strategy, [weight], optimizer = _setup(
        lambda: SGD(1.0, momentum=0.5), kind=kind
    )
    step = _step(strategy, lambda: optimizer.apply([_gradient()], [weight]))
    step = step.python_function if is_eager else step
    step()
    step()
    expected = [-27.5, -27.5, -2750, -2750]
    assert replicas.values(strategy, weight) == expected
    assert replicas.values(strategy, optimizer.iterations) == [2] * 4


@replicas.on_mirrored_and_permuted
def test_in_cond(kind):
    """The replicas agree although the branch has a graph of its own.

    With another one inside, a LossScaleOptimizer's, and under MirroredStrategy
    with other patterns of None.
    """
    strategy, variables, optimizer = _setup(
        lambda: keras.optimizers.LossScaleOptimizer(
            SGD(1.0), initial_scale=2.0
        ),
        num_variables=2,
        kind=kind,
    )
    has_none = kind == "mirrored"

    def on_replica(due):
        def apply():
            own = 2.0 * _gradient()
            lacks = has_none and replicas.replica_id() == 1
            optimizer.apply([own, None if lacks else own], variables)
            return 1

        tf.cond(due, apply, lambda: 0)

    step = _step(strategy, on_replica)
    step(tf.constant(False))
    step(tf.constant(True))
    first, second = (replicas.values(strategy, v) for v in variables)
    assert first == [-11, -11, -1100, -1100]
    assert second == ([-1, -1, -1100, -1100] if has_none else first)


@pytest.mark.parametrize(
    "kind, is_inside",
    [
        ("mirrored", False),
        ("tpu_permuted", False),
        # One program for all replicas: they meet inside the loop, too.
        ("tpu", True),
        ("mirrored", True),
    ],
)
def test_in_a_loop_around_or_inside_run(kind, is_inside):
    """Refused, and no hang, where replicas would meet in loops of their own."""
    strategy, [weight], optimizer = _setup(kind=kind)
    with strategy.scope():
        optimizer.build([weight])

    def on_replica():
        optimizer.apply([_gradient()], [weight])

    def inside():
        for _ in tf.range(5):
            on_replica()

    @tf.function
    def steps():
        if is_inside:
            strategy.run(inside)
        else:
            for _ in tf.range(5):
                strategy.run(on_replica)

    if kind == "mirrored" and is_inside:
        with pytest.raises(RuntimeError, match="Put the loop around strategy"):
            steps()
        assert replicas.values(strategy, weight) == [0.0] * 4
    else:
        steps()
        assert replicas.values(strategy, weight) == [-55, -55, -5500, -5500]


@replicas.on_mirrored_and_tpu
def test_several_optimizers_over_the_same_devices_in_one_step(kind):
    """A generator and a discriminator, with other groups, equal shapes.

    Each trace of the step adds sums of its own.
    """
    strategy, variables, one = _setup(num_variables=3, kind=kind)
    with strategy.scope():
        two = _summing(SGD(1.0), [[0, 3], [1, 2]])
        three = _summing(SGD(1.0), PAIRS)

    def on_replica(scales):
        for scale in scales:
            one.apply([scale * _gradient()], variables[:1])
            two.apply([scale * _gradient()], variables[1:2])
            three.apply([3 * scale * _gradient()], variables[2:])

    step, total = _step(strategy, on_replica), 0
    for number in (1, 2, 1):
        step([tf.constant(1.0)] * number)
        total -= number
        first, second, third = (
            np.stack(replicas.values(strategy, v)) / total for v in variables
        )
        assert first.tolist() == [11, 11, 1100, 1100]
        assert second.tolist() == [1001, 110, 110, 1001]
        assert third.tolist() == [33, 33, 3300, 3300]


@replicas.on_mirrored_and_tpu
def test_a_subset_of_tensorflows_variables(kind):
    strategy = replicas.STRATEGIES[kind](2)
    with strategy.scope():
        variables = [tf.Variable(0.0) for _ in range(3)]
        optimizer = _summing(SGD(0.5, momentum=0.5), None)
        optimizer.build(variables)
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [tf.constant(10.0**r), tf.constant(2 * 10.0**r)],
        [variables[2], variables[0]],
    )
    got = [replicas.values(strategy, v) for v in variables]
    assert got == [[-11] * 2, [0] * 2, [-5.5] * 2]


def test_a_variable_is_known_by_tensorflow_s_inside_it():
    """As in plain Keras: gradients may come for either."""
    for make in (
        tf_xshard.CrossShardOptimizer,
        lambda inner: tf_xshard.TowerOptimizer(inner, 1),
        lambda inner: tf_xshard.AGNOptimizer(inner, communication_period=1),
    ):
        weight, optimizer = keras.Variable(1.0), make(SGD(0.5))
        optimizer.build([weight])
        optimizer.apply([tf.constant(1.0)], [weight.value])
        assert float(weight) == 0.5


def test_an_optimizer_that_was_inside_another_one():
    """Alone it undoes 1/N again; inside others it takes their place."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(0.0)
        cross = tf_xshard.CrossShardOptimizer(SGD(1.0))
        towers = tf_xshard.TowerOptimizer(cross, 2)
        agn = tf_xshard.AGNOptimizer(SGD(1.0), communication_period=1)
        apart = tf_xshard.CrossShardOptimizer(agn, group_assignment=[[0], [1]])
    for optimizer, num_steps, expected in (
        (towers, 2, [-11, -11]),
        (cross, 1, [-11, -11]),
        (apart, 1, [-2, -20]),
        (agn, 1, [-11, -11]),
        (apart, 1, [-2, -20]),
    ):
        weight.assign(0.0)
        for _ in range(num_steps):
            replicas.apply_once(
                strategy, optimizer, lambda r: [tf.constant(10.0**r)], [weight]
            )
        assert replicas.values(strategy, weight) == expected
    assert agn.group_assignment is None


def test_hooks_see_unscaled_gradients():
    """1/N undone, loss scale divided out, for each replica's own gradient.

    Float16 overflows neither before a hook nor after one. A replica without a
    gradient of a variable has no pair of it.
    """
    seen = {"pre": {}, "post": {}}

    def record(stage):
        def function(pairs):
            values = [float(gradient) for gradient, _ in pairs]
            seen[stage][replicas.replica_id()] = values
            return pairs

        return function

    scale = 2.0**13
    _, weights = steps.stepped(
        lambda: tf_xshard.CrossShardOptimizer(
            keras.optimizers.LossScaleOptimizer(SGD(1.0), initial_scale=scale),
            "mean",
            PAIRS,
            pre_reduce=record("pre"),
            post_reduce=record("post"),
        ),
        lambda r: [
            tf.constant(scale / 4, "float16") if r else None,
            tf.constant(2**r * scale / 4, "float16"),
        ],
        [0.0, 0.0],
        graph=False,
        dtype="float16",
    )
    assert seen["pre"] == {0: [1], 1: [1, 2], 2: [1, 4], 3: [1, 8]}
    assert [seen["post"][r][-1] for r in range(4)] == [1.5, 1.5, 6, 6]
    assert weights == [-1.5, -1.5, -6, -6]


@pytest.mark.parametrize(
    "argument, kind",
    [
        ("pre_reduce", "mirrored"),
        ("post_reduce", "mirrored"),
        ("pre_reduce", "tpu"),
    ],
)
def test_clipping_before_and_after(argument, kind):
    """Replica 3's huge gradient is clipped before, or drowns the others."""
    own = np.array([[0.3, 0.4], [0.3, -0.4], [0.0, 0.5], [300.0, 400.0]])
    [weights] = steps.stepped(
        lambda: tf_xshard.CrossShardOptimizer(
            SGD(1.0), **{argument: tf_xshard.clip_by_global_norm(1.0)}
        ),
        lambda r: [tf.constant(own[r] / 4, tf.float32)],
        [np.zeros(2)],
        kind,
    )

    def clip(gradient):
        return gradient / max(1.0, np.linalg.norm(gradient))

    expected = clip(np.mean(own, axis=0))
    if argument == "pre_reduce":
        expected = np.mean([clip(g) for g in own], axis=0)
    for got in weights:
        np.testing.assert_allclose(got, -expected, rtol=1e-5)
