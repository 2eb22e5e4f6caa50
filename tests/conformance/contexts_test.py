"""Where a step may be: functions, conditionals, loops, orders of calls."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import steps

SGD = keras.optimizers.SGD


@functools.cache
def _multi_worker(num_replicas):
    # Away from the keys of tests/support/replicas.py.
    tf.distribute.MultiWorkerMirroredStrategy._collective_key_base = 50_000_000
    return tf.distribute.MultiWorkerMirroredStrategy._from_local_devices(
        [f"/device:CPU:{i}" for i in range(num_replicas)]
    )


STRATEGIES = {**replicas.STRATEGIES, "multi_worker": _multi_worker}


def _setup(
    num_replicas=4,
    inner=lambda: SGD(1.0),
    groups=None,
    num_variables=1,
    kind="mirrored",
    make_variable=keras.Variable,
):
    strategy = STRATEGIES[kind](num_replicas)
    with strategy.scope():
        variables = [make_variable(0.0) for _ in range(num_variables)]
        optimizer = _summing(inner(), groups)
    return strategy, variables, optimizer


def _summing(inner, groups=None, **kwargs):
    return tf_xshard.CrossShardOptimizer(
        inner, "sum", groups, loss_normalization="replica", **kwargs
    )


_gradient = replicas.power_of_ten


def _step(strategy, on_replica):
    return tf.function(
        lambda *args: strategy.run(on_replica, args), autograph=False
    )


@pytest.mark.parametrize(
    "kind, is_eager",
    [
        ("mirrored", False),
        ("mirrored", True),
        ("multi_worker", False),
        ("multi_worker", True),
        ("tpu", False),
    ],
)
def test_unbuilt_on_first_use(kind, is_eager):
    strategy, [weight], optimizer = _setup(
        inner=lambda: SGD(1.0, momentum=0.5),
        groups=[[0, 2], [1, 3]],
        kind=kind,
    )
    step = _step(strategy, lambda: optimizer.apply([_gradient()], [weight]))
    step = step.python_function if is_eager else step
    step()
    step()
    assert replicas.values(strategy, weight) == [-252.5, -2525] * 2
    assert replicas.values(strategy, optimizer.iterations) == [2] * 4


@replicas.on_mirrored_and_permuted
def test_in_cond(kind):
    """The replicas agree although the branch has a graph of its own.

    With another one inside, a LossScaleOptimizer's, and under MirroredStrategy
    with other patterns of None.
    """
    strategy, variables, optimizer = _setup(
        inner=lambda: keras.optimizers.LossScaleOptimizer(
            SGD(1.0), initial_scale=2.0
        ),
        groups=[[0, 1], [2, 3]],
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
    "kind, where",
    [
        ("mirrored", "around run"),
        ("tpu_permuted", "around run"),
        # One program for all replicas: they meet inside the loop, too.
        ("tpu", "in the replica function"),
        ("mirrored", "in the replica function"),
    ],
)
def test_in_a_loop(kind, where):
    """Refused, and no hang, where replicas would meet in loops of their own."""
    strategy, [weight], optimizer = _setup(groups=[[0, 1], [2, 3]], kind=kind)
    with strategy.scope():
        optimizer.build([weight])

    @tf.function
    def steps(count):
        def on_replica(count):
            for _ in tf.range(count):
                optimizer.apply([_gradient()], [weight])

        if where == "around run":
            for _ in tf.range(count):
                strategy.run(lambda: optimizer.apply([_gradient()], [weight]))
        else:
            strategy.run(on_replica, args=(count,))

    if (kind, where) == ("mirrored", "in the replica function"):
        with pytest.raises(RuntimeError, match="Put the loop around strategy"):
            steps(tf.constant(5))
        assert replicas.values(strategy, weight) == [0.0] * 4
    else:
        steps(tf.constant(5))
        assert replicas.values(strategy, weight) == [-55, -55, -5500, -5500]


@replicas.on_mirrored_and_tpu
def test_several_optimizers_over_the_same_devices_in_one_step(kind):
    """A generator and a discriminator, with other groups, equal shapes."""
    strategy, variables, one = _setup(
        groups=[[0, 1], [2, 3]], num_variables=3, kind=kind
    )
    with strategy.scope():
        two = _summing(SGD(1.0), [[0, 3], [1, 2]])
        three = _summing(SGD(1.0), [[0, 1], [2, 3]])

    def on_replica():
        one.apply([_gradient()], variables[:1])
        two.apply([_gradient()], variables[1:2])
        three.apply([3 * _gradient()], variables[2:])

    step = _step(strategy, on_replica)
    step()
    step()
    first, second, third = (replicas.values(strategy, v) for v in variables)
    assert first == [-22, -22, -2200, -2200]
    assert second == [-2002, -220, -220, -2002]
    assert third == [-66, -66, -6600, -6600]


@replicas.on_mirrored_and_tpu
def test_a_function_that_is_traced_again(kind):
    strategy, [weight], optimizer = _setup(2, kind=kind)

    def on_replica(scales):
        for scale in scales:
            optimizer.apply([_gradient() * scale], [weight])

    step = _step(strategy, on_replica)
    for number in (1, 2, 1):
        step([tf.constant(1.0)] * number)
    assert replicas.values(strategy, weight) == [-44, -44]


def test_a_subset_of_the_variables():
    strategy, variables, optimizer = _setup(2, num_variables=3)
    with strategy.scope():
        optimizer.build(variables)
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [tf.constant(1.0), tf.constant(2.0)],
        [variables[2], variables[0]],
    )
    got = [replicas.values(strategy, v) for v in variables]
    assert got == [[-4] * 2, [0] * 2, [-2] * 2]


@replicas.on_mirrored_and_tpu
def test_tf_variables(kind):
    strategy, [weight], optimizer = _setup(
        2,
        lambda: keras.optimizers.Adam(0.5),
        kind=kind,
        make_variable=tf.Variable,
    )
    replicas.apply_once(
        strategy, optimizer, lambda r: [tf.constant(10.0**r)], [weight]
    )
    np.testing.assert_allclose(
        replicas.values(strategy, weight), [-0.5, -0.5], atol=1e-5
    )


@pytest.mark.parametrize(
    "make",
    [
        tf_xshard.CrossShardOptimizer,
        lambda inner: tf_xshard.TowerOptimizer(inner, 2),
        tf_xshard.AGNOptimizer,
    ],
    ids=["cross", "tower", "agn"],
)
def test_a_call_outside_the_scope_changes_nothing(make):
    """Keras writes to all copies of a weight, and to one of a counter."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable([1.0, 1.0])
        optimizer = make(SGD(1.0))
    with pytest.raises(
        RuntimeError, match="applied outside of it, where there"
    ):
        optimizer.apply([tf.ones([2])], [weight])
    assert not optimizer.built
    for value in replicas.values(strategy, weight):
        np.testing.assert_array_equal(value, 1.0)


@pytest.mark.parametrize(
    "normalization, divisor", [("global", 4), ("replica", 1)]
)
def test_hooks_see_unscaled_gradients(normalization, divisor):
    """1/N undone, loss scale divided out, for each replica's own gradient."""
    seen = {"pre": {}, "post": {}}

    def record(stage):
        def function(pairs):
            [(gradient, _)] = pairs
            seen[stage][replicas.replica_id()] = float(gradient)
            return pairs

        return function

    [weights] = steps.stepped(
        lambda: tf_xshard.CrossShardOptimizer(
            keras.optimizers.LossScaleOptimizer(SGD(1.0), initial_scale=512.0),
            "mean",
            [[0, 1], [2, 3]],
            loss_normalization=normalization,
            pre_reduce=record("pre"),
            post_reduce=record("post"),
        ),
        lambda r: [tf.constant(512.0 * 10.0**r / divisor)],
        graph=False,
    )
    assert seen["pre"] == {0: 1, 1: 10, 2: 100, 3: 1000}
    assert seen["post"] == {0: 5.5, 1: 5.5, 2: 550, 3: 550}
    assert weights == [-5.5, -5.5, -550, -550]


@pytest.mark.parametrize("arguments", [(), ("pre_reduce",), ("post_reduce",)])
def test_a_hook_that_does_nothing_changes_nothing_in_float16(arguments):
    """Nor does it overflow where the gradient itself would not."""
    [weights] = steps.stepped(
        lambda: tf_xshard.CrossShardOptimizer(
            keras.optimizers.LossScaleOptimizer(
                SGD(1.0 / 16), initial_scale=2.0**13
            ),
            **dict.fromkeys(arguments, lambda pairs: pairs),
        ),
        lambda r: [tf.constant(5.0 / 2 * 2**13, tf.float16)],
        num_replicas=2,
        dtype="float16",
    )
    assert weights == [-0.3125] * 2


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


def test_a_hook_gets_no_pair_without_a_gradient():
    counts = []
    _, second = steps.stepped(
        lambda: _summing(
            SGD(1.0),
            pre_reduce=lambda pairs: counts.append(len(pairs)) or pairs,
        ),
        lambda r: [tf.constant(1.0), tf.constant(1.0) if r else None],
        [0.0, 0.0],
        num_replicas=2,
        graph=False,
    )
    assert counts == [1, 2]
    assert second == [-1.0, -1.0]


def test_a_replica_that_does_not_take_part_is_an_error_and_no_hang():
    strategy, [weight], optimizer = _setup(2)
    with strategy.scope():
        optimizer.build([weight])

    def on_replica():
        if replicas.replica_id() == 0:
            optimizer.apply([tf.constant(1.0)], [weight])

    with pytest.raises(RuntimeError, match="different number of"):
        _step(strategy, on_replica)()
    assert replicas.values(strategy, weight) == [0.0, 0.0]
