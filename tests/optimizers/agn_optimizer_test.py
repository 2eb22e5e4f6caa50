"""AGNOptimizer: oracles, identities, exchanges, the end of fit, refusals."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import agn_oracle
from tests.support import collective_counts
from tests.support import replicas
from tests.support import training

O = keras.optimizers  # noqa: E741


def _train(strategy, make, num_steps, graph=True):
    """(local, center) of each replica after every step; the optimizer."""
    with strategy.scope():
        weight = keras.Variable([10.0, -2.0], dtype="float32")
        optimizer = make()
        optimizer.build([weight])

    def step(gradients):
        def on_replica():
            g = tf.gather(gradients, replicas.replica_id_tensor())
            optimizer.apply([g], [weight])

        strategy.run(on_replica)

    step = tf.function(step, autograph=False) if graph else step
    history = []
    ids = range(strategy.num_replicas_in_sync)
    for number in range(1, num_steps + 1):
        gradients = [agn_oracle.gradient(r, number) for r in ids]
        step(tf.constant(gradients, tf.float32))
        history.append(
            [
                replicas.values(strategy, one)
                for one in (weight, optimizer.center_variables[0])
            ]
        )
    return history, weight, optimizer


def _agn(inner, period, **kwargs):
    return lambda: tf_xshard.AGNOptimizer(
        inner(),
        communication_period=period,
        loss_normalization="replica",
        **kwargs,
    )


def _check(history, expected):
    for got, wanted in zip(history, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def _sgd():
    return O.SGD(0.1)


AGN_GROUPS = [[[0, 1, 2, 3]], [[0, 2], [3, 1]]]


@pytest.mark.parametrize(
    "name, groups, kind",
    [
        *replicas.in_turn(agn_oracle.OPTIMIZERS, AGN_GROUPS, ["mirrored"]),
        ("nesterov", AGN_GROUPS[1], "tpu"),
        ("adagrad", AGN_GROUPS[1], "tpu_permuted"),
    ],
    ids=str,
)
def test_oracle(name, groups, kind):
    oracle, make = agn_oracle.OPTIMIZERS[name]
    strategy = replicas.STRATEGIES[kind](4)
    history, _, optimizer = _train(
        strategy, _agn(make, 3, group_assignment=groups), 10
    )
    _check(history, agn_oracle.history(oracle, oracle, 4, groups, 3, 10))
    assert optimizer.iterations.numpy() == 10
    assert optimizer.exchanges.numpy() == 3
    # They drift apart in between, or the test would not see the exchange.
    assert np.abs(history[0][0][0] - history[0][0][1]).max() > 1e-3 or (
        name in ("adam", "adagrad")
    )


@pytest.mark.parametrize(
    "reduction, normalize, accumulate, graph",
    replicas.pairwise(
        ["mean", "sum"],
        [True, False],
        ["gradients", "updates"],
        [True, False],
    ),
)
def test_variants(reduction, normalize, accumulate, graph):
    """The local optimizer is a copy of the center's."""
    variant = {
        "reduction": reduction,
        "normalize": normalize,
        "accumulate": accumulate,
    }
    oracle, make = agn_oracle.OPTIMIZERS["momentum"]
    history, *_ = _train(
        replicas.mirrored(2),
        _agn(make, 2, local_optimizer=None, **variant),
        7,
        graph,
    )
    _check(
        history,
        agn_oracle.history(oracle, oracle, 2, [[0, 1]], 2, 7, **variant),
    )


def test_another_local_optimizer():
    local, make_local = agn_oracle.OPTIMIZERS["adam"]
    history, _, optimizer = _train(
        replicas.mirrored(2),
        lambda: tf_xshard.AGNOptimizer(
            O.SGD(0.5, momentum=0.9),
            communication_period=2,
            local_optimizer=make_local(),
            loss_normalization="replica",
        ),
        7,
    )
    inner = lambda: agn_oracle.SGD(0.5, 0.9)
    _check(history, agn_oracle.history(inner, local, 2, [[0, 1]], 2, 7))
    assert float(optimizer.learning_rate.numpy()) == np.float32(0.1)
    optimizer.learning_rate = 0.25
    assert float(optimizer.local_optimizer.learning_rate.numpy()) == 0.25
    assert float(optimizer.inner_optimizer.learning_rate.numpy()) == 0.5


def test_the_oracle_tells_variants_apart():
    oracle = agn_oracle.OPTIMIZERS["momentum"][0]
    base = (oracle, oracle, 4, [[0, 2], [3, 1]], 2, 6)
    right = agn_oracle.history(*base)[-1]
    for wrong in (
        agn_oracle.history(*base, reduction="sum"),
        agn_oracle.history(*base, normalize=False),
        agn_oracle.history(*base, accumulate="updates"),
        agn_oracle.history(oracle, oracle, 4, [[0, 1, 2, 3]], 2, 6),
        agn_oracle.history(oracle, oracle, 4, [[0, 1], [2, 3]], 2, 6),
        agn_oracle.history(oracle, oracle, 4, [[0, 2], [3, 1]], 3, 6),
    ):
        assert np.abs(np.array(right[1]) - np.array(wrong[-1][1])).max() > 1e-2


def _check_locals(make_outer, kind, rate, expected, tolerance):
    """Three periods of three steps of local momentum SGD; the locals."""
    for normalize, factor in ((False, 1.0), (True, 3.0)):
        history, *_ = _train(
            replicas.STRATEGIES[kind](2),
            lambda normalize=normalize, factor=factor: tf_xshard.AGNOptimizer(
                make_outer(factor),
                communication_period=3,
                local_optimizer=O.SGD(rate, momentum=0.9),
                accumulate="updates",
                normalize=normalize,
                loss_normalization="replica",
            ),
            9,
        )
        got = [local for local, _ in history]
        np.testing.assert_allclose(
            got, expected, rtol=tolerance, atol=tolerance
        )


def test_local_sgd():
    """SGD(1) on updates averages models; normalized, SGD(period) does."""
    models = [np.array([10.0, -2.0]) for _ in range(2)]
    momenta = [np.zeros(2) for _ in range(2)]
    expected = []
    for step in range(1, 10):
        for r in range(2):
            momenta[r] = 0.9 * momenta[r] - 0.1 * agn_oracle.gradient(r, step)
            models[r] = models[r] + momenta[r]
        if step % 3 == 0:
            models = [np.mean(models, axis=0)] * 2
        expected.append(list(models))
    _check_locals(O.SGD, "mirrored", 0.1, expected, 1e-5)


def test_diloco():
    """Nesterov's momentum on the mean update, as in arXiv 2311.08105.

    The outer step is PyTorch's: b <- 0.9 b + d; center <- center - 0.7 (d +
    0.9 b).
    """
    center, buffer = np.array([10.0, -2.0]), np.zeros(2)
    momenta = [np.zeros(2) for _ in range(2)]
    expected = []
    for start in (1, 4, 7):
        models = [center.copy() for _ in range(2)]
        for step in range(start, start + 3):
            for r in range(2):
                g = agn_oracle.gradient(r, step)
                momenta[r] = 0.9 * momenta[r] - 0.05 * g
                models[r] = models[r] + momenta[r]
            expected.append(list(models))
        outer_gradient = center - np.mean(models, axis=0)
        buffer = 0.9 * buffer + outer_gradient
        center = center - 0.7 * (outer_gradient + 0.9 * buffer)
        expected[-1] = [center] * 2

    def outer(factor):
        return O.SGD(0.7 * factor, momentum=0.9, nesterov=True)

    _check_locals(outer, "tpu_permuted", 0.05, expected, 2e-5)


def test_period_1_with_sgd_is_cross_shard():
    one = training.alone(_sgd)
    _, agn = training.train(
        lambda: tf_xshard.AGNOptimizer(_sgd(), communication_period=1),
        replicas.mirrored(2),
    )
    assert training.deviation(agn, one) <= 1e-6


@pytest.mark.parametrize(
    "make, kind",
    [
        (_agn(_sgd, 4), "mirrored"),
        (_agn(_sgd, 4, accumulate="updates"), "tpu_permuted"),
        (lambda: tf_xshard.TowerOptimizer(_sgd(), 4), "mirrored"),
        (lambda: tf_xshard.TowerOptimizer(_sgd(), 4), "tpu"),
    ],
    ids=["agn", "agn_updates_tpu", "tower", "tower_tpu"],
)
def test_nothing_crosses_between_exchanges(make, kind):
    """Collectives are in the branch of the exchange, which runs when due."""
    strategy = replicas.STRATEGIES[kind](2)
    (always, conditional), ran = collective_counts.trained(strategy, make, 11)
    assert always == 0
    # A TPU's program is one for all replicas.
    assert conditional == (2 if kind == "mirrored" else 1)
    assert ran == [2, 2]


@pytest.mark.parametrize("kind", ["mirrored", "tpu"])
def test_the_end_of_fit(kind):
    """An early exchange, divided by the pending steps; the center stays."""
    strategy = replicas.STRATEGIES[kind](2)
    make = agn_oracle.OPTIMIZERS["momentum"][1]
    _, weight, optimizer = _train(strategy, _agn(make, 3), 5)
    before = replicas.values(strategy, optimizer.center_variables[0])[0]
    momentum = replicas.values(
        strategy, optimizer.inner_optimizer.momentums[0]
    )[0]
    optimizer.finalize_variable_values([weight])
    total = sum(agn_oracle.gradient(r, s) for r in range(2) for s in (4, 5))
    expected = before + 0.9 * momentum - 0.1 * total / 2 / 2
    for variable in (weight, optimizer.center_variables[0]):
        for value in replicas.values(strategy, variable):
            np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert optimizer.exchanges.numpy() == 2
    optimizer.finalize_variable_values([weight])
    assert optimizer.exchanges.numpy() == 2


def test_two_fits_equal_one_on_a_period_boundary():
    strategy = replicas.mirrored(2)
    x, y = training.data()

    def trained(*parts, steps_per_execution=1):
        with strategy.scope():
            model = training.model()
            model.compile(
                tf_xshard.AGNOptimizer(
                    O.SGD(0.1, momentum=0.9), communication_period=3
                ),
                "mse",
                steps_per_execution=steps_per_execution,
            )
        for start, end in parts:
            rows = slice(16 * start, 16 * end)
            model.fit(x[rows], y[rows], batch_size=16, shuffle=False, verbose=0)
        return training.weights(model, strategy)

    one = trained((0, 12), steps_per_execution=4)
    for values in one:
        np.testing.assert_array_equal(values[0], values[1])
    assert training.deviation(trained((0, 6), (6, 12)), one) <= 1e-6
    assert training.deviation(trained((0, 5), (5, 12)), one) > 1e-6


def test_config():
    optimizer = tf_xshard.AGNOptimizer(
        O.Adam(0.1),
        communication_period=7,
        local_optimizer=O.SGD(0.2),
        accumulate="updates",
        normalize=False,
        reduction="sum",
        group_assignment=[[0]],
        loss_normalization="replica",
        communication=tf_xshard.Communication(timeout_seconds=5),
        name="mine",
    )
    other = tf_xshard.AGNOptimizer.from_config(optimizer.get_config())
    assert other.get_config() == optimizer.get_config()
    assert other.communication_period == 7


@pytest.mark.parametrize(
    "inner, arguments, error, text",
    [
        (O.SGD, {"communication_period": 0}, ValueError, "must be positive"),
        (O.SGD, {"communication_period": 2.0}, TypeError, "must be an int"),
        (O.SGD, {"num_worker": 3}, ValueError, "the strategy has 1"),
        (O.SGD, {"num_worker": "1"}, TypeError, "must be an int"),
        (O.SGD, {"accumulate": "deltas"}, ValueError, "accumulate must be"),
        (O.SGD, {"reduction": "max"}, ValueError, "reduction must be"),
        (O.SGD, {"normalize": 1}, TypeError, "normalize must be"),
        (O.SGD, {"local_optimizer": "sgd"}, TypeError, "local_optimizer must"),
        (O.SGD, {"clipnorm": 1.0}, ValueError, "set it on the inner"),
        (lambda: O.LossScaleOptimizer(O.SGD()), {}, ValueError, "Use bfloat16"),
        (lambda: O.SGD(loss_scale_factor=8.0), {}, ValueError, "Use bfloat16"),
        (
            lambda: tf_xshard.CrossShardOptimizer(O.SGD()),
            {},
            ValueError,
            "already reduces gradients",
        ),
    ],
)
def test_refusals(inner, arguments, error, text):
    with pytest.raises(error, match=text):
        tf_xshard.AGNOptimizer(inner(), **arguments)


def test_float8_statistics_and_one_object_for_both_are_refused():
    scale = keras.Variable(1.0, name="amax")
    scale.overwrite_with_gradient = True
    optimizer = tf_xshard.AGNOptimizer(O.SGD(1.0))
    with pytest.raises(ValueError, match="amax is overwritten by its gradient"):
        optimizer.build([keras.Variable(1.0), scale])
    one = O.SGD()
    with pytest.raises(ValueError, match="inner optimizer itself"):
        tf_xshard.AGNOptimizer(one, local_optimizer=one)


@functools.cache
def _seen_in_fit(*swap_on_epoch):
    """Lists the values that later callbacks see in two epochs."""
    strategy = replicas.mirrored(2)
    x, y = training.data()
    with strategy.scope():
        model = training.model()
        model.compile(
            tf_xshard.AGNOptimizer(O.SGD(0.1), communication_period=3), "mse"
        )
        model.optimizer.build(model.trainable_variables)
    [variable, *_] = model.trainable_variables
    [center, *_] = model.optimizer.center_variables
    seen = []

    def note(where):
        return lambda index, logs=None: seen.append(
            (where, *(replicas.values(strategy, v) for v in (variable, center)))
        )

    model.fit(
        x,
        y,
        batch_size=64,  # Four steps an epoch: never at a boundary.
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(x[:64], y[:64]),
        callbacks=[
            *(tf_xshard.SwapCenterWeights(one) for one in swap_on_epoch),
            keras.callbacks.LambdaCallback(
                on_train_batch_begin=note("train"),
                on_test_batch_end=note("test"),
                on_epoch_end=note("epoch"),
            ),
        ],
    )
    return seen, training.weights(model, strategy)


@pytest.mark.parametrize("swap_on_epoch", [True, False])
def test_the_callback_shows_the_center(swap_on_epoch):
    seen, weights = _seen_in_fit(swap_on_epoch)
    seen_without, weights_without = _seen_in_fit()
    # Training is the same; the swap changes what others see.
    assert training.deviation(weights, weights_without) <= replicas.REPEATED
    for (where, *shown), (_, *plain) in zip(seen, seen_without, strict=True):
        if where == "test" or (where == "epoch" and swap_on_epoch):
            plain = plain[::-1]
        np.testing.assert_allclose(shown, plain, 0, replicas.REPEATED)
    _, [first, second], _ = next(s for s in seen_without if s[0] == "test")
    assert np.abs(first - second).max() > 1e-4


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras 3.15"
)
def test_a_multi_optimizer_of_the_center():
    """Its averages reach the model, and a gradient of None is no error."""

    def train(wrap):
        strategy = replicas.mirrored(2)
        with strategy.scope():
            variables = [keras.Variable([0.0]), keras.Variable([5.0])]
            inner = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
            optimizer = tf_xshard.AGNOptimizer(
                wrap(inner),
                communication_period=1,
                local_optimizer=keras.optimizers.SGD(1.0),
                loss_normalization="replica",
            )
            optimizer.build(variables)
        step = replicas.applying(
            strategy,
            optimizer,
            lambda r: [tf.constant([r + 0.5]), None],
            variables,
        )
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            step()
        step()
        step()
        optimizer.finalize_variable_values(variables)
        return [replicas.values(strategy, one) for one in variables]

    # The mean gradient is 1, so the center is -1, -2 and -3.
    average = -1.0
    for value in (-2.0, -3.0):
        average = (average + value) / 2
    for found in (
        train(lambda inner: inner),
        train(
            lambda inner: keras.optimizers.MultiOptimizer(
                keras.optimizers.OptimizerMap(inner)
            )
        ),
    ):
        for trained, frozen in zip(*found, strict=True):
            np.testing.assert_allclose(trained, [average])
            np.testing.assert_allclose(frozen, [5.0])
