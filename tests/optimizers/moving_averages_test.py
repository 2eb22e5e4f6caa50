"""Moving averages of the weights (`use_ema`) and SwapEMAWeights."""

import keras
import numpy as np
import pytest

import tf_xshard
from tests.support import replicas
from tests.support import seeds

O = keras.optimizers  # noqa: E741


def _averaging(rate=0.1):
    return O.SGD(rate, use_ema=True, ema_momentum=0.5)


def _fit(make, strategy):
    seeds.seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((5,)), keras.layers.Dense(3)]
        )
        model.compile(make(), "mse", auto_scale_loss=False)
    x = np.linspace(-1, 1, 80, dtype="float32").reshape(16, 5)
    history = model.fit(
        x,
        x[:, :3],
        batch_size=16,
        epochs=3,
        shuffle=False,
        verbose=0,
        validation_data=(x, x[:, :3]),
        callbacks=[keras.callbacks.SwapEMAWeights()],
    )
    return history.history["val_loss"], model.get_weights()[0]


@pytest.fixture(scope="module")
def alone():
    return _fit(_averaging, replicas.mirrored(1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf_xshard.CrossShardOptimizer(
            O.LossScaleOptimizer(_averaging())
        ),
        lambda: tf_xshard.TowerOptimizer(_averaging(), 1),
    ],
    ids=["through_a_loss_scale_optimizer", "tower"],
)
def test_swapped(make, alone):
    """`evaluate` sees the averages, as with plain Keras on one device."""
    losses, weights = _fit(make, replicas.mirrored(2))
    want_losses, want_weights = alone
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    np.testing.assert_allclose(weights, want_weights, atol=1e-6)


def _agn():
    return tf_xshard.AGNOptimizer(_averaging(), communication_period=2)


@pytest.mark.parametrize(
    "make, num_replicas, error",
    [
        (_agn, 1, "can't .*AGNOptimizer"),
        (lambda: tf_xshard.TowerOptimizer(_agn(), 1), 1, "can't .*AGNOptimiz"),
        (
            lambda: tf_xshard.CrossShardOptimizer(
                _averaging(), shard_update=True
            ),
            2,
            "can't .*shard of the averages",
        ),
    ],
)
def test_refuses_to_swap_them(make, num_replicas, error):
    with pytest.raises(ValueError, match=f"SwapEMAWeights {error}"):
        _fit(make, replicas.mirrored(num_replicas))
