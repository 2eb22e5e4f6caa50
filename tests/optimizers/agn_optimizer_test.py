"""AGNOptimizer: oracles, identities, exchanges, the center, the end of fit."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import agn_oracle
from tests.support import collective_counts
from tests.support import replicas
from tests.support import traced
from tests.support import versions

O = keras.optimizers  # noqa: E741
START = [10.0, -2.0]
PAIRS = [[0, 2], [3, 1]]
ALL = [[0, 1]]
VARIANTS = {
    "updates": {"accumulate": "updates"},
    "whole": {"normalize": False},
    "sum": {"reduction": "sum"},
}


def _gradients(num_replicas, num_steps):
    return np.array(
        [
            [agn_oracle.gradient(r, step) for r in range(num_replicas)]
            for step in range(1, num_steps + 1)
        ]
    )


def _steps(one, gradients):
    """The local and center values of each replica after every step."""
    [center] = one.optimizer.center_variables
    for arriving in gradients:
        one.step(arriving)
        yield *one.values(), np.stack(replicas.values(one.strategy, center))


def _agn(inner, period, **kwargs):
    return lambda: tf_xshard.AGNOptimizer(
        inner(),
        communication_period=period,
        loss_normalization="replica",
        **kwargs,
    )


@pytest.mark.parametrize(
    "name, local, kind, groups, period, variant, graph",
    [
        ("momentum", None, "mirrored", PAIRS, 3, "", True),
        ("nesterov", None, "tpu", PAIRS, 3, "", True),
        ("adagrad", None, "tpu_permuted", PAIRS, 3, "", True),
        ("sgd", None, "multi_worker", PAIRS, 3, "", False),
        ("momentum", "adam", "mirrored", ALL, 2, "", True),
        ("sgd", None, "mirrored", ALL, 1, "", True),
        ("momentum", None, "mirrored", ALL, 2, "updates sum", True),
        ("momentum", None, "mirrored", ALL, 2, "updates whole", False),
        ("momentum", None, "mirrored", ALL, 2, "sum", False),
        ("momentum", None, "mirrored", ALL, 2, "sum whole", True),
    ],
    ids=lambda one: {"": "plain", str(ALL): "all", str(PAIRS): "pairs"}.get(
        str(one), str(one)
    ),
)
def test_oracle(name, local, kind, groups, period, variant, graph):
    """Without a local optimizer, that is a copy of the center's."""
    settings = [VARIANTS[word] for word in variant.split()]
    variant = dict(itertools.chain(*(one.items() for one in settings)))
    num_replicas, num_steps = len(np.ravel(groups)), 3 * period + 1
    oracle, make = agn_oracle.OPTIMIZERS[name]
    local_oracle, make_local = agn_oracle.OPTIMIZERS[local or name]
    one = traced.Traced(
        lambda: _agn(
            make,
            period,
            group_assignment=None if len(groups) == 1 else groups,
            local_optimizer=make_local() if local else None,
            **variant,
        )(),
        [START],
        kind,
        num_replicas,
        graph=graph,
    )
    found = _steps(one, _gradients(num_replicas, num_steps))
    expected = agn_oracle.history(
        oracle, local_oracle, num_replicas, groups, period, num_steps, **variant
    )
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)
    counts = replicas.values(one.strategy, one.optimizer.iterations)
    assert counts == [num_steps] * num_replicas
    exchanges = replicas.values(one.strategy, one.optimizer.exchanges)
    assert exchanges == [num_steps // period] * num_replicas


def test_learning_rates():
    """A schedule of `fit` sets the local optimizer's."""
    optimizer = _agn(lambda: O.SGD(0.5), 2, local_optimizer=O.Adam(0.125))()
    assert float(optimizer.learning_rate.numpy()) == 0.125
    optimizer.learning_rate = 0.25
    assert float(optimizer.local_optimizer.learning_rate.numpy()) == 0.25
    assert float(optimizer.inner_optimizer.learning_rate.numpy()) == 0.5


@pytest.mark.parametrize(
    "rate, outer_momentum, normalize, kind",
    [
        (1.0, 0.0, False, "mirrored"),  # Local SGD: averages of models.
        (1.0, 0.0, True, "mirrored"),
        (0.7, 0.9, False, "tpu_permuted"),  # DiLoCo.
    ],
)
def test_local_sgd_and_diloco(rate, outer_momentum, normalize, kind):
    """Nesterov's momentum on the mean update, as in arXiv 2311.08105.

    The outer step is PyTorch's: b <- 0.9 b + d; center <- center - 0.7 (d +
    0.9 b). Normalized, the outer rate is times the period.
    """
    gradients = _gradients(2, 9)
    outer = rate * (3.0 if normalize else 1.0)
    one = traced.Traced(
        lambda: _agn(
            lambda: O.SGD(outer, outer_momentum, nesterov=True),
            3,
            local_optimizer=O.SGD(0.05, momentum=0.9),
            accumulate="updates",
            normalize=normalize,
        )(),
        [START],
        kind,
        2,
    )
    models, momenta = np.array([START, START]), np.zeros([2, 2])
    center, buffer = np.array(START), np.zeros(2)
    for step, (got, _) in enumerate(_steps(one, gradients), 1):
        momenta = 0.9 * momenta - 0.05 * gradients[step - 1]
        models = models + momenta
        if step % 3 == 0:
            update = center - np.mean(models, axis=0)
            buffer = outer_momentum * buffer + update
            center = center - rate * (update + outer_momentum * buffer)
            models = np.array([center, center])
        np.testing.assert_allclose(got, models, rtol=2e-5, atol=2e-5)


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
    gradients = _gradients(2, 5)
    *_, (_, before) = _steps(one, gradients)
    [slot] = one.optimizer.inner_optimizer.momentums
    velocity = np.stack(replicas.values(one.strategy, slot))
    expected = before + 0.9 * velocity - 0.1 * np.mean(gradients[3:], (0, 1))
    [center] = one.optimizer.center_variables
    for _ in range(2):  # Again, nothing is pending.
        one.optimizer.finalize_variable_values(one.weights)
        found = np.stack(replicas.values(one.strategy, center))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        np.testing.assert_array_equal(found, *one.values())
        exchanges = replicas.values(one.strategy, one.optimizer.exchanges)
        assert exchanges == [2, 2]


def test_the_model_shows_the_center_until_training_goes_on():
    """All replicas swap, and training continues with the local values."""
    one = traced.Traced(_agn(lambda: O.SGD(0.1), 3), [START], "mirrored", 2)
    gradients = _gradients(2, 7)
    plain = list(_steps(one, gradients))
    one.reset()
    *_, (local, center) = _steps(one, gradients[:5])
    assert np.abs(local[0] - local[1]).max() > 1e-2
    [variable] = one.optimizer.center_variables
    for shown, values in ((True, [center, local]), (False, [local, center])):
        one.optimizer.show_center(shown)
        assert one.optimizer.center_is_shown == shown
        found = replicas.values(one.strategy, variable)
        np.testing.assert_array_equal([*one.values(), found], values)
    for got, want in zip(_steps(one, gradients[5:]), plain[5:], strict=True):
        np.testing.assert_array_equal(got, want)


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
