"""AGNOptimizer: its oracle, exchanges, the center, the end of fit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import collective_counts
from tests.support import random_stacks
from tests.support import replicas
from tests.support import stacks
from tests.support import traced
from tests.support import versions

O = keras.optimizers  # noqa: E741
START = [10.0, -2.0]
PAIRS = [[0, 2], [3, 1]]
MOMENTUM = ("sgd", {"rate": 0.1, "momentum": 0.5})
NESTEROV = ("sgd", {"rate": 0.7, "momentum": 0.9, "nesterov": True})


def _gradients(num_steps, num_replicas=2):
    """g_r of every step, tenfold from replica to replica."""
    rng = np.random.default_rng(0)
    return random_stacks.random_gradients(
        rng, num_steps, num_replicas, "float32"
    )


def _agn(inner, period, **kwargs):
    return lambda: tf_xshard.AGNOptimizer(
        inner(),
        communication_period=period,
        loss_normalization="replica",
        **kwargs,
    )


@pytest.mark.parametrize(
    "kind, graph, options, center",
    [
        pytest.param(kind, graph, {"period": 3, **options}, center, id=name)
        for name, kind, graph, options, center in (
            ("mirrored", "mirrored", True, {"groups": PAIRS}, MOMENTUM),
            ("tpu", "tpu", True, {"groups": PAIRS}, NESTEROV),
            ("permuted", "tpu_permuted", True, {"groups": PAIRS}, MOMENTUM),
            ("workers", "multi_worker", False, {"groups": PAIRS}, MOMENTUM),
            # With SGD, this is CrossShardOptimizer.
            ("every_step", "mirrored", True, {"period": 1}, ("sgd", {})),
            ("sum", "mirrored", False, {"reduction": "sum"}, MOMENTUM),
            ("whole", "mirrored", True, {"normalize": False}, MOMENTUM),
            (
                "local_sgd",
                "mirrored",
                True,
                {
                    "accumulate": "updates",
                    "normalize": False,
                    "local": MOMENTUM,
                },
                ("sgd", {"rate": 1.0}),
            ),
            # arXiv 2311.08105.
            (
                "diloco",
                "tpu_permuted",
                True,
                {
                    "accumulate": "updates",
                    "normalize": False,
                    "local": MOMENTUM,
                },
                NESTEROV,
            ),
            (
                "updates_sum",
                "mirrored",
                False,
                {"accumulate": "updates", "reduction": "sum"},
                MOMENTUM,
            ),
        )
    ],
)
def test_oracle(kind, graph, options, center):
    """Within and after each period, on all replicas.

    Without a local optimizer, that is a copy of the center's.
    """
    stack = ("agn", options, center)
    num_replicas = 4 if "groups" in options else 2
    one = traced.Traced(
        lambda: stacks.optimizer_of(stack, loss_normalization="replica"),
        [np.zeros(stacks.SIZE)],
        kind,
        num_replicas,
        graph=graph,
    )
    period = options["period"]
    gradients = _gradients(3 * period + 1, num_replicas)
    for num_steps in (period, 2 * period + 1, 3 * period + 1):
        [got] = one.run(gradients[:num_steps])
        stacks.check(got, stack, gradients[:num_steps], num_steps)
        for count, want in (
            (one.optimizer.iterations, num_steps),
            (one.optimizer.exchanges, num_steps // period),
        ):
            found = replicas.values(one.strategy, count)
            assert found == [want] * num_replicas


def _center(one):
    [center] = one.optimizer.center_variables
    return np.stack(replicas.values(one.strategy, center))


def test_learning_rates():
    """A schedule of `fit` sets the local optimizer's."""
    optimizer = _agn(lambda: O.SGD(0.5), 2, local_optimizer=O.Adam(0.125))()
    assert float(optimizer.learning_rate.numpy()) == 0.125
    optimizer.learning_rate = 0.25
    assert float(optimizer.local_optimizer.learning_rate.numpy()) == 0.25
    assert float(optimizer.inner_optimizer.learning_rate.numpy()) == 0.5


@pytest.mark.parametrize(
    "make, kind",
    [
        (_agn(O.SGD, 4), "mirrored"),
        (_agn(O.SGD, 4, accumulate="updates"), "tpu_permuted"),
        (lambda: tf_xshard.TowerOptimizer(O.SGD(), 4), "mirrored"),
        (lambda: tf_xshard.TowerOptimizer(O.SGD(), 4), "tpu"),
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


@pytest.mark.parametrize("kind", ["mirrored", "multi_worker", "tpu"])
def test_the_end_of_fit(kind):
    """An early exchange, divided by the pending steps; then the center."""
    momentum = lambda: O.SGD(0.1, momentum=0.9)
    one = traced.Traced(_agn(momentum, 3), [START], kind, 2)
    gradients = _gradients(5)
    one.run(gradients)
    [slot] = one.optimizer.inner_optimizer.momentums
    velocity = np.stack(replicas.values(one.strategy, slot))
    mean = np.mean(gradients[3:], (0, 1))
    expected = _center(one) + 0.9 * velocity - 0.1 * mean
    for _ in range(2):  # Again, nothing is pending.
        one.optimizer.finalize_variable_values(one.weights)
        np.testing.assert_allclose(_center(one), expected, rtol=1e-5)
        np.testing.assert_array_equal(_center(one), *one.values())
        exchanges = replicas.values(one.strategy, one.optimizer.exchanges)
        assert exchanges == [2, 2]


def test_the_model_shows_the_center_until_training_goes_on():
    """All replicas swap, and training continues with the local values."""
    one = traced.Traced(_agn(lambda: O.SGD(0.1), 3), [START], "mirrored", 2)
    gradients = _gradients(7)
    [expected] = one.run(gradients)
    [local] = one.run(gradients[:5])
    center = _center(one)
    assert np.abs(local[0] - local[1]).max() > 1e-3
    for shown, values in ((True, [center, local]), (False, [local, center])):
        one.optimizer.show_center(shown)
        assert one.optimizer.center_is_shown == shown
        np.testing.assert_array_equal([*one.values(), _center(one)], values)
    for arriving in gradients[5:]:
        one.step(arriving)
    np.testing.assert_array_equal(*one.values(), expected)


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
    config = optimizer.get_config()
    other = tf_xshard.AGNOptimizer.from_config(config)
    assert other.get_config() == config
    assert config["communication_period"] == 7 and not config["normalize"]
    assert config["accumulate"] == "updates" and config["reduction"] == "sum"


@versions.needs_multi_optimizer
def test_a_multi_optimizer_of_the_center():
    """Its averages reach the model, and a gradient of None is no error."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        variables = [keras.Variable([0.0]), keras.Variable([5.0])]
        inner = O.SGD(1.0, use_ema=True, ema_momentum=0.5)
        optimizer = _agn(
            lambda: O.MultiOptimizer(O.OptimizerMap(inner)),
            1,
            local_optimizer=O.SGD(1.0),
        )()
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
    # The mean gradient is 1, so the center is -1, -2 and -3.
    average = (((-1.0 - 2.0) / 2) - 3.0) / 2
    assert replicas.values(strategy, variables[0]) == [[average]] * 2
    assert replicas.values(strategy, variables[1]) == [[5.0]] * 2
