"""Where a step may be: functions, conditionals, loops, orders of calls."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import training

SGD = keras.optimizers.SGD


def _setup(
    num_replicas=4,
    inner=None,
    groups=None,
    num_variables=1,
    kind="mirrored",
):
    strategy = replicas.STRATEGIES[kind](num_replicas)
    with strategy.scope():
        variables = [keras.Variable(0.0) for _ in range(num_variables)]
        optimizer = tf_xshard.CrossShardOptimizer(
            inner() if inner else SGD(1.0),
            "sum",
            groups,
            loss_normalization="replica",
        )
    return strategy, variables, optimizer


_gradient = replicas.power_of_ten


@pytest.mark.parametrize(
    "kind, run",
    [(kind, "function") for kind in replicas.STRATEGIES]
    + [("mirrored", "eager")],
)
def test_unbuilt_on_first_use(kind, run):
    strategy, [weight], optimizer = _setup(
        inner=lambda: SGD(1.0, momentum=0.5),
        groups=[[0, 2], [1, 3]],
        kind=kind,
    )

    def step():
        strategy.run(lambda: optimizer.apply([_gradient()], [weight]))

    step = tf.function(step, autograph=False) if run == "function" else step
    step()
    step()
    assert replicas.values(strategy, weight) == [
        -2.5 * 101,
        -2.5 * 1010,
        -2.5 * 101,
        -2.5 * 1010,
    ]
    assert replicas.values(strategy, optimizer.iterations) == [2] * 4


def test_in_cond_with_other_patterns_of_none():
    """The replicas agree although the branch has a graph of its own."""
    strategy, variables, optimizer = _setup(num_variables=2)

    @tf.function
    def step(due):
        def on_replica():
            def apply():
                second = None if replicas.replica_id() == 1 else _gradient()
                optimizer.apply([_gradient(), second], variables)
                return 1

            tf.cond(due, apply, lambda: 0)

        strategy.run(on_replica)

    step(tf.constant(False))
    step(tf.constant(True))
    assert replicas.values(strategy, variables[0]) == [-1111.0] * 4
    assert replicas.values(strategy, variables[1]) == [-1101.0] * 4


@replicas.on_every_strategy
def test_in_a_loop_around_run(kind):
    strategy, [weight], optimizer = _setup(groups=[[0, 1], [2, 3]], kind=kind)

    @tf.function
    def steps(count):
        for _ in tf.range(count):
            strategy.run(lambda: optimizer.apply([_gradient()], [weight]))

    steps(tf.constant(5))
    assert replicas.values(strategy, weight) == [-55, -55, -5500, -5500]


@pytest.mark.parametrize("kind", replicas.TPUS)
def test_in_a_loop_on_a_tpu(kind):
    """One program for all replicas: they meet inside the loop, too."""
    strategy, [weight], optimizer = _setup(groups=[[0, 1], [2, 3]], kind=kind)
    with strategy.scope():
        optimizer.build([weight])

    @tf.function
    def steps(count):
        def on_replica(count):
            for _ in tf.range(count):
                optimizer.apply([_gradient()], [weight])

        strategy.run(on_replica, args=(count,))

    steps(tf.constant(5))
    assert replicas.values(strategy, weight) == [-55, -55, -5500, -5500]


def test_a_loop_in_the_replica_function_is_an_error_and_no_hang():
    strategy, [weight], optimizer = _setup()

    @tf.function
    def steps(count):
        def on_replica():
            for _ in tf.range(count):
                optimizer.apply([_gradient()], [weight])

        strategy.run(on_replica)

    with pytest.raises(RuntimeError, match="Put the loop around strategy.run"):
        steps(tf.constant(5))
    assert replicas.values(strategy, weight) == [0.0] * 4


@replicas.on_every_strategy
def test_a_loss_scale_optimizer_in_cond(kind):
    strategy, [weight], optimizer = _setup(
        kind=kind,
        inner=lambda: keras.optimizers.LossScaleOptimizer(
            SGD(1.0), initial_scale=2.0
        ),
        groups=[[0, 1], [2, 3]],
    )

    @tf.function
    def step(due):
        def on_replica():
            def apply():
                optimizer.apply([2.0 * _gradient()], [weight])
                return 1

            tf.cond(due, apply, lambda: 0)

        strategy.run(on_replica)

    step(tf.constant(True))
    step(tf.constant(False))
    assert replicas.values(strategy, weight) == [-11, -11, -1100, -1100]


@replicas.on_every_strategy
def test_two_optimizers_over_the_same_devices_in_one_step(kind):
    """A generator and a discriminator, with other groups, equal shapes."""
    strategy, [first], one = _setup(groups=[[0, 1], [2, 3]], kind=kind)
    with strategy.scope():
        second = keras.Variable(0.0)
        two = tf_xshard.CrossShardOptimizer(
            SGD(1.0), "sum", [[0, 3], [1, 2]], loss_normalization="replica"
        )
        third = keras.Variable(0.0)
        three = tf_xshard.CrossShardOptimizer(
            SGD(1.0), "sum", [[0, 1], [2, 3]], loss_normalization="replica"
        )

    @tf.function
    def step():
        def on_replica():
            one.apply([_gradient()], [first])
            two.apply([_gradient()], [second])
            three.apply([3 * _gradient()], [third])

        strategy.run(on_replica)

    for _ in range(10):
        step()
    assert replicas.values(strategy, first) == [-110, -110, -11000, -11000]
    assert replicas.values(strategy, second) == [-10010, -1100, -1100, -10010]
    assert replicas.values(strategy, third) == [-330, -330, -33000, -33000]


@replicas.on_every_strategy
def test_strategies_of_other_sizes_in_one_process(kind):
    for num_replicas in (4, 2, 8, 2, 4):
        strategy, [weight], optimizer = _setup(num_replicas, kind=kind)
        replicas.apply_once(
            strategy, optimizer, lambda r: [tf.constant(10.0**r)], [weight]
        )
        total = sum(10**r for r in range(num_replicas))
        assert replicas.values(strategy, weight) == [-total] * num_replicas


@replicas.on_every_strategy
def test_a_function_that_is_traced_again(kind):
    strategy, [weight], optimizer = _setup(groups=[[0, 1], [2, 3]], kind=kind)

    @tf.function
    def step(scale, twice):
        def on_replica():
            optimizer.apply([_gradient() * scale], [weight])
            if twice:
                optimizer.apply([_gradient() * scale], [weight])

        strategy.run(on_replica)

    step(tf.constant(1.0), False)
    step(tf.constant(1.0), True)
    step(tf.constant(1.0), False)
    assert replicas.values(strategy, weight) == [-44, -44, -4400, -4400]


@replicas.on_every_strategy
def test_a_subset_of_the_variables(kind):
    strategy, variables, optimizer = _setup(num_variables=3, kind=kind)
    with strategy.scope():
        optimizer.build(variables)
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [tf.constant(1.0), tf.constant(2.0)],
        [variables[2], variables[0]],
    )
    assert [replicas.values(strategy, v)[3] for v in variables] == [-8, 0, -4]


@replicas.on_every_strategy
def test_tf_variables(kind):
    strategy = replicas.STRATEGIES[kind](2)
    with strategy.scope():
        weight = tf.Variable(0.0)
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.Adam(0.5), "sum", loss_normalization="replica"
        )
    replicas.apply_once(
        strategy, optimizer, lambda r: [tf.constant(10.0**r)], [weight]
    )
    np.testing.assert_allclose(
        replicas.values(strategy, weight), [-0.5, -0.5], atol=1e-5
    )


def test_multi_worker_strategy_over_local_devices():
    # Away from the keys of tests/support/replicas.py.
    tf.distribute.MultiWorkerMirroredStrategy._collective_key_base = 50_000_000
    strategy = tf.distribute.MultiWorkerMirroredStrategy._from_local_devices(
        [f"/device:CPU:{i}" for i in range(4)]
    )
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = tf_xshard.CrossShardOptimizer(
            SGD(1.0), "sum", [[0, 3], [1, 2]], loss_normalization="replica"
        )
    for graph in (True, False):
        replicas.apply_once(
            strategy,
            optimizer,
            lambda r: [tf.constant(10.0**r)],
            [weight],
            graph,
        )
    assert replicas.values(strategy, weight) == [-2002, -220, -220, -2002]


def test_outside_the_scope_all_copies_are_written():
    strategy, [weight], optimizer = _setup(2)
    optimizer.apply([tf.constant(2.0)], [weight])
    assert replicas.values(strategy, weight) == [-2.0, -2.0]


def test_two_models_in_one_process():
    reference = training.train(lambda: SGD(0.05))[1]
    strategy = replicas.mirrored(4)
    for _ in range(2):
        got = training.train(
            lambda: tf_xshard.CrossShardOptimizer(SGD(0.05)),
            strategy,
            fit=True,
        )[1]
        assert training.deviation(got, reference) <= 1e-6


def test_hooks_see_unscaled_gradients():
    """1/N undone, loss scale divided out, for each replica's own gradient."""
    seen = {}

    def record(stage):
        def function(pairs):
            [(gradient, _)] = pairs
            seen.setdefault(stage, {})[replicas.replica_id()] = float(gradient)
            return pairs

        return function

    strategy = replicas.mirrored(4)
    for normalization, divisor in (("global", 4), ("replica", 1)):
        seen.clear()
        with strategy.scope():
            weight = keras.Variable(0.0)
            optimizer = tf_xshard.CrossShardOptimizer(
                keras.optimizers.LossScaleOptimizer(
                    SGD(1.0), initial_scale=512.0
                ),
                "mean",
                [[0, 1], [2, 3]],
                loss_normalization=normalization,
                pre_reduce=record("pre"),
                post_reduce=record("post"),
            )
        replicas.apply_once(
            strategy,
            optimizer,
            lambda r, divisor=divisor: [tf.constant(512.0 * 10.0**r / divisor)],
            [weight],
            graph=False,
        )
        assert seen["pre"] == {0: 1, 1: 10, 2: 100, 3: 1000}
        assert seen["post"] == {0: 5.5, 1: 5.5, 2: 550, 3: 550}
        assert replicas.values(strategy, weight) == [-5.5, -5.5, -550, -550]


@pytest.mark.parametrize("argument", ["pre_reduce", "post_reduce"])
def test_a_hook_that_does_nothing_changes_nothing_in_float16(argument):
    """Nor does it overflow where the gradient itself would not."""
    strategy = replicas.mirrored(2)
    for hook in (None, lambda pairs: pairs):
        with strategy.scope():
            weight = keras.Variable(0.0, dtype="float16")
            optimizer = tf_xshard.CrossShardOptimizer(
                keras.optimizers.LossScaleOptimizer(
                    SGD(1.0 / 16), initial_scale=2.0**13
                ),
                **{argument: hook},
            )
        replicas.apply_once(
            strategy,
            optimizer,
            lambda r: [tf.constant(5.0 / 2 * 2**13, tf.float16)],
            [weight],
        )
        assert replicas.values(strategy, weight) == [-0.3125] * 2


@replicas.on_every_strategy
@pytest.mark.parametrize("argument", ["pre_reduce", "post_reduce"])
def test_clipping_before_and_after(argument, kind):
    """Replica 3's huge gradient is clipped before, or drowns the others."""
    strategy = replicas.STRATEGIES[kind](4)
    with strategy.scope():
        weight = keras.Variable([0.0, 0.0])
        optimizer = tf_xshard.CrossShardOptimizer(
            SGD(1.0), **{argument: tf_xshard.clip_by_global_norm(1.0)}
        )
    own = np.array([[0.3, 0.4], [0.3, -0.4], [0.0, 0.5], [300.0, 400.0]])
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [tf.constant(own[r] / 4, tf.float32)],
        [weight],
    )

    def clip(gradient):
        return gradient / max(1.0, np.linalg.norm(gradient))

    expected = (
        np.mean([clip(g) for g in own], axis=0)
        if argument == "pre_reduce"
        else clip(np.mean(own, axis=0))
    )
    for got in replicas.values(strategy, weight):
        np.testing.assert_allclose(got, -expected, rtol=1e-5)


def test_a_hook_gets_no_pair_without_a_gradient():
    strategy, variables, optimizer = _setup(2, num_variables=2)
    counts = []
    with strategy.scope():
        optimizer = tf_xshard.CrossShardOptimizer(
            SGD(1.0),
            pre_reduce=lambda pairs: counts.append(len(pairs)) or pairs,
        )
    replicas.apply_once(
        strategy,
        optimizer,
        lambda r: [tf.constant(1.0), tf.constant(1.0) if r else None],
        variables,
        graph=False,
    )
    assert counts == [1, 2]
    assert replicas.values(strategy, variables[1]) == [-1.0, -1.0]


def test_a_replica_that_does_not_take_part_is_an_error_and_no_hang():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = tf_xshard.CrossShardOptimizer(SGD(1.0))
        optimizer.build([weight])

    @tf.function
    def step():
        def on_replica():
            if replicas.replica_id() == 0:
                optimizer.apply([tf.constant(1.0)], [weight])

        strategy.run(on_replica)

    with pytest.raises(RuntimeError, match="different number of"):
        step()
    assert replicas.values(strategy, weight) == [0.0, 0.0]
