"""AGNOptimizer: oracles, identities, exchanges, the end of fit, refusals."""

import itertools

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
    for number in range(1, num_steps + 1):
        step(
            tf.constant(
                [
                    agn_oracle.gradient(r, number)
                    for r in range(strategy.num_replicas_in_sync)
                ],
                tf.float32,
            )
        )
        history.append(
            (
                replicas.values(strategy, weight),
                replicas.values(strategy, optimizer.center_variables[0]),
            )
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


AGN_GROUPS = [[[0, 1, 2, 3]], [[0, 2], [3, 1]]]


@pytest.mark.parametrize(
    "name, groups, kind",
    [
        *itertools.product(agn_oracle.OPTIMIZERS, AGN_GROUPS, ["mirrored"]),
        *replicas.in_turn(
            agn_oracle.OPTIMIZERS, AGN_GROUPS[::-1], replicas.TPUS
        ),
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


@pytest.mark.parametrize("graph", [True, False], ids=["function", "eager"])
@pytest.mark.parametrize("accumulate", ["gradients", "updates"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_variants(reduction, normalize, accumulate, graph):
    """With another local optimizer than the center's."""
    variant = {
        "reduction": reduction,
        "normalize": normalize,
        "accumulate": accumulate,
    }
    history, *_ = _train(
        replicas.mirrored(2),
        _agn(
            agn_oracle.OPTIMIZERS["momentum"][1],
            2,
            local_optimizer=None,
            **variant,
        ),
        7,
        graph,
    )
    oracle = agn_oracle.OPTIMIZERS["momentum"][0]
    _check(
        history,
        agn_oracle.history(oracle, oracle, 2, [[0, 1]], 2, 7, **variant),
    )


def test_another_local_optimizer():
    strategy = replicas.mirrored(2)

    def make():
        return tf_xshard.AGNOptimizer(
            O.SGD(0.5, momentum=0.9),
            communication_period=2,
            local_optimizer=O.Adam(0.1),
            loss_normalization="replica",
        )

    history, _, optimizer = _train(strategy, make, 7)
    _check(
        history,
        agn_oracle.history(
            lambda: agn_oracle.SGD(0.5, 0.9),
            agn_oracle.OPTIMIZERS["adam"][0],
            2,
            [[0, 1]],
            2,
            7,
        ),
    )
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


def _locally_trained(make_outer, kind, rate):
    """Three periods of three steps of local momentum SGD; the locals."""

    def make(normalize, learning_rate_factor):
        return tf_xshard.AGNOptimizer(
            make_outer(learning_rate_factor),
            communication_period=3,
            local_optimizer=O.SGD(rate, momentum=0.9),
            accumulate="updates",
            normalize=normalize,
            loss_normalization="replica",
        )

    strategy = replicas.STRATEGIES[kind](4)
    for normalize, factor in ((False, 1.0), (True, 3.0)):
        history, *_ = _train(strategy, lambda: make(normalize, factor), 9)
        yield [local for local, _ in history]


@replicas.on_mirrored_and_permuted
def test_local_sgd(kind):
    """SGD(1) on updates averages models; normalized, SGD(period) does."""
    models = [np.array([10.0, -2.0]) for _ in range(4)]
    momenta = [np.zeros(2) for _ in range(4)]
    expected = []
    for step in range(1, 10):
        for r in range(4):
            momenta[r] = 0.9 * momenta[r] - 0.1 * agn_oracle.gradient(r, step)
            models[r] = models[r] + momenta[r]
        if step % 3 == 0:
            models = [np.mean(models, axis=0)] * 4
        expected.append(list(models))
    for got in _locally_trained(O.SGD, kind, rate=0.1):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@replicas.on_mirrored_and_permuted
def test_diloco(kind):
    """Nesterov's momentum on the mean update, as in arXiv 2311.08105.

    The outer step is PyTorch's: b <- 0.9 b + d; center <- center - 0.7 (d +
    0.9 b).
    """
    center, buffer = np.array([10.0, -2.0]), np.zeros(2)
    momenta = [np.zeros(2) for _ in range(4)]
    expected = []
    for start in (1, 4, 7):
        models = [center.copy() for _ in range(4)]
        for step in range(start, start + 3):
            for r in range(4):
                g = agn_oracle.gradient(r, step)
                momenta[r] = 0.9 * momenta[r] - 0.05 * g
                models[r] = models[r] + momenta[r]
            expected.append(list(models))
        outer_gradient = center - np.mean(models, axis=0)
        buffer = 0.9 * buffer + outer_gradient
        center = center - 0.7 * (outer_gradient + 0.9 * buffer)
        expected[-1] = [center] * 4

    def outer(factor):
        return O.SGD(0.7 * factor, momentum=0.9, nesterov=True)

    for got in _locally_trained(outer, kind, rate=0.05):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@replicas.on_mirrored_and_permuted
def test_period_1_with_sgd_is_cross_shard(kind):
    strategy = replicas.STRATEGIES[kind](4)
    _, agn = training.train(
        lambda: tf_xshard.AGNOptimizer(O.SGD(0.1), communication_period=1),
        strategy,
    )
    one = training.train(lambda: O.SGD(0.1))[1]
    assert training.deviation(agn, one) <= 1e-6


@replicas.on_mirrored_and_permuted
@pytest.mark.parametrize("accumulate", ["gradients", "updates"])
def test_nothing_crosses_between_exchanges(accumulate, kind):
    """Collectives are in the branch of the exchange, which runs when due."""
    (always, conditional), ran = collective_counts.trained(
        replicas.STRATEGIES[kind](2),
        lambda: tf_xshard.AGNOptimizer(
            O.Adam(0.1), communication_period=4, accumulate=accumulate
        ),
        11,
    )
    assert always == 0
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


@pytest.mark.parametrize("steps, same", [(6, True), (5, False)])
def test_two_fits_equal_one_on_a_period_boundary(steps, same):
    strategy = replicas.mirrored(2)
    x, y = training.data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)

    def fit(*parts):
        with strategy.scope():
            model = training.model()
            model.compile(
                tf_xshard.AGNOptimizer(
                    O.SGD(0.1, momentum=0.9), communication_period=3
                ),
                "mse",
            )
        for start, count in parts:
            model.fit(dataset.skip(start).take(count), shuffle=False, verbose=0)
        return training.weights(model, strategy)

    one = fit((0, 12))
    two = fit((0, steps), (steps, 12 - steps))
    assert (training.deviation(two, one) <= 1e-6) == same
    for values in one:
        np.testing.assert_array_equal(values[0], values[1])


@pytest.mark.parametrize("way", ["keras", "checkpoint"])
def test_state_survives_saving(way, tmp_path):
    """At a boundary, where replicas are equal."""
    strategy = replicas.mirrored(2)
    x, y = training.data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)

    def make():
        with strategy.scope():
            model = training.model()
            model.compile(
                tf_xshard.AGNOptimizer(
                    O.SGD(1.0, momentum=0.5),
                    communication_period=2,
                    local_optimizer=O.Adam(0.01),
                    accumulate="updates",
                    normalize=False,
                ),
                "mse",
            )
            model.optimizer.build(model.trainable_variables)
        return model

    def fit(model, start, count):
        model.fit(dataset.skip(start).take(count), shuffle=False, verbose=0)

    model = make()
    fit(model, 0, 4)
    path = str(tmp_path / "model")
    if way == "keras":
        model.save(path + ".keras")
        with strategy.scope():
            other = keras.saving.load_model(path + ".keras")
    else:
        tf.train.Checkpoint(model).write(path)
        other = make()
        tf.train.Checkpoint(other).read(path).assert_consumed()
    for one in (model, other):
        fit(one, 4, 6)
    assert other.optimizer.exchanges.numpy() == 5
    # Adam's slots differ by replica, and files hold replica 0's.
    largest = training.deviation(
        training.weights(other, strategy), training.weights(model, strategy)
    )
    assert largest < 0.05


@pytest.mark.parametrize("steps_per_execution", [4, 1])
def test_fit_learns(steps_per_execution):
    model, weights = training.train(
        lambda: tf_xshard.AGNOptimizer(O.Adam(0.01)),
        replicas.mirrored(2),
        num_steps=40,
        steps_per_execution=steps_per_execution,
    )
    x, y = training.data()
    start = np.mean((training.model().predict(x, verbose=0) - y) ** 2)
    assert model.evaluate(x, y, verbose=0) < 0.8 * start
    for values in weights:
        for value in values:
            np.testing.assert_array_equal(value, values[0])


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
    "arguments, error, text",
    [
        ({"communication_period": 0}, ValueError, "must be positive"),
        ({"communication_period": 2.0}, TypeError, "must be an int"),
        ({"num_worker": 3}, ValueError, "the strategy has 1"),
        ({"num_worker": "1"}, TypeError, "must be an int"),
        ({"accumulate": "deltas"}, ValueError, "accumulate must be"),
        ({"normalize": 1}, TypeError, "normalize must be"),
        ({"reduction": "max"}, ValueError, "reduction must be"),
        ({"local_optimizer": "sgd"}, TypeError, "local_optimizer must be"),
        ({"inner_optimizer": None}, TypeError, "wraps a keras"),
        (
            {"inner_optimizer": O.LossScaleOptimizer(O.SGD())},
            ValueError,
            "Use bfloat16",
        ),
        (
            {"inner_optimizer": O.SGD(loss_scale_factor=8.0)},
            ValueError,
            "Use bfloat16",
        ),
        (
            {"inner_optimizer": tf_xshard.CrossShardOptimizer(O.SGD())},
            ValueError,
            "reduces by itself",
        ),
        ({"clipnorm": 1.0}, ValueError, "set it on the inner"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(arguments, error, text):
    with pytest.raises(error, match=text):
        tf_xshard.AGNOptimizer(**{"inner_optimizer": O.SGD(), **arguments})


def test_float8_statistics_are_refused():
    scale = keras.Variable(1.0, name="amax")
    scale.overwrite_with_gradient = True
    optimizer = tf_xshard.AGNOptimizer(O.SGD(1.0))
    with pytest.raises(ValueError, match="amax is overwritten by its gradient"):
        optimizer.build([keras.Variable(1.0), scale])


def test_one_object_for_both_is_refused():
    one = O.SGD()
    with pytest.raises(ValueError, match="inner optimizer itself"):
        tf_xshard.AGNOptimizer(one, local_optimizer=one)


class _Recorder(keras.callbacks.Callback):
    """What the model holds on each replica, when others look."""

    def __init__(self, strategy):
        super().__init__()
        self.strategy = strategy
        self.seen = []

    def _record(self, where):
        optimizer = self.model.optimizer
        variable = self.model.trainable_variables[0]
        self.seen.append(
            (
                where,
                replicas.values(self.strategy, variable),
                replicas.values(self.strategy, optimizer.center_variables[0]),
            )
        )

    def on_test_batch_end(self, batch, logs=None):
        self._record("test")

    def on_epoch_end(self, epoch, logs=None):
        self._record("epoch")

    def on_train_batch_begin(self, batch, logs=None):
        self._record("train")


@pytest.mark.parametrize(
    "swap_on_epoch, kind", [(True, "mirrored"), (False, "tpu")]
)
def test_the_callback_shows_the_center(swap_on_epoch, kind):
    strategy = replicas.STRATEGIES[kind](2)
    x, y = training.data()
    got = {}
    for shown in (False, True):
        with strategy.scope():
            model = training.model()
            model.compile(
                tf_xshard.AGNOptimizer(O.SGD(0.1), communication_period=3),
                "mse",
            )
            model.optimizer.build(model.trainable_variables)
        recorder = _Recorder(strategy)
        callbacks = [tf_xshard.SwapCenterWeights(swap_on_epoch), recorder]
        model.fit(
            x,
            y,
            batch_size=64,  # Four steps an epoch: never at a boundary.
            epochs=2,
            shuffle=False,
            verbose=0,
            validation_data=(x[:64], y[:64]),
            callbacks=callbacks if shown else callbacks[1:],
        )
        got[shown] = recorder.seen, training.weights(model, strategy)
    # Training is the same; the swap changes what others see.
    assert training.deviation(got[True][1], got[False][1]) == 0.0
    for (where, mine, center), (_, plain, true_center) in zip(
        got[True][0], got[False][0], strict=True
    ):
        is_shown = where == "test" or (where == "epoch" and swap_on_epoch)
        for r in range(2):
            np.testing.assert_array_equal(
                mine[r], true_center[r] if is_shown else plain[r]
            )
            np.testing.assert_array_equal(
                center[r], plain[r] if is_shown else true_center[r]
            )
    first = next(one for one in got[False][0] if one[0] == "test")
    assert np.abs(first[1][0] - first[1][1]).max() > 1e-4


def test_the_callback_needs_the_optimizer():
    model = training.model()
    model.compile("sgd", "mse")
    x, y = training.data()
    with pytest.raises(ValueError, match="needs a model that is compiled"):
        model.fit(x, y, verbose=0, callbacks=[tf_xshard.SwapCenterWeights()])
