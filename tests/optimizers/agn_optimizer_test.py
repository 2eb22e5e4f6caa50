"""AGNOptimizer: its oracle, exchanges, the center, the end of fit."""

import keras
import numpy as np
import pytest

import tf_xshard
from tests.support import collective_counts
from tests.support import random_stacks
from tests.support import replicas
from tests.support import stacks
from tests.support import traced

O = keras.optimizers  # noqa: E741
START = [10.0, -2.0]
IN_PAIRS = {"groups": [[0, 2], [3, 1]]}
SGD = ("sgd", {"rate": 1.0})
MOMENTUM = ("sgd", {"rate": 0.1, "momentum": 0.5})
NESTEROV = ("sgd", {"rate": 0.7, "momentum": 0.9, "nesterov": True})
UPDATES = {
    "accumulate": "updates",
    "normalize": False,
    "local_optimizer": MOMENTUM,
}


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
        pytest.param("mirrored", True, IN_PAIRS, MOMENTUM, id="mirrored"),
        pytest.param("tpu", True, IN_PAIRS, NESTEROV, id="tpu"),
        pytest.param("tpu_permuted", True, IN_PAIRS, MOMENTUM, id="permuted"),
        pytest.param("multi_worker", False, IN_PAIRS, MOMENTUM, id="workers"),
        # With SGD, this is CrossShardOptimizer.
        pytest.param("mirrored", True, {"period": 1}, SGD, id="every_step"),
        pytest.param(
            "mirrored", False, {"reduction": "sum"}, MOMENTUM, id="sum"
        ),
        pytest.param("mirrored", True, UPDATES, SGD, id="local_sgd"),
        # arXiv 2311.08105.
        pytest.param("tpu_permuted", True, UPDATES, NESTEROV, id="diloco"),
    ],
)
def test_oracle(kind, graph, options, center):
    """Within and after each period, on all replicas.

    Without a local optimizer, that is a copy of the center's.
    """
    options = {"period": 3, **options}
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
    ],
    ids=["agn", "agn_updates_tpu", "tower"],
)
def test_nothing_crosses_between_exchanges(make, kind):
    """Collectives are in the branch of the exchange, which runs when due."""
    strategy = replicas.STRATEGIES[kind](2)
    always, in_branches, ran = collective_counts.trained(strategy, make, 11)
    assert always == 0
    # A TPU's program is one for all replicas.
    assert in_branches == (2 if kind == "mirrored" else 1)
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
    for shown in (True, False, True):
        one.optimizer.show_center(shown)
        assert one.optimizer.center_is_shown == shown
        values = [center, local] if shown else [local, center]
        np.testing.assert_array_equal([*one.values(), _center(one)], values)
    with pytest.raises(RuntimeError, match="show_center.* in replica context"):
        one.strategy.run(lambda: one.optimizer.show_center(False))
    # Also where nobody has put the local values back.
    for arriving in gradients[5:]:
        one.step(arriving)
        one.optimizer.show_center(False)
    np.testing.assert_array_equal(*one.values(), expected)


def test_config():
    settings = {
        "communication_period": 7,
        "accumulate": "updates",
        "normalize": False,
        "reduction": "sum",
    }
    config = tf_xshard.AGNOptimizer(
        O.Adam(0.1),
        local_optimizer=O.SGD(0.2),
        communication=tf_xshard.Communication(timeout_seconds=5),
        **settings,
    ).get_config()
    assert settings.items() <= config.items()
    assert tf_xshard.AGNOptimizer.from_config(config).get_config() == config
