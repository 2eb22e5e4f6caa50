"""Moving averages of the weights (`use_ema`) and SwapEMAWeights."""

import functools

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


@functools.cache
def _alone():
    return _fit(_averaging, replicas.mirrored(1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf_xshard.CrossShardOptimizer(
            O.LossScaleOptimizer(_averaging())
        ),
        lambda: tf_xshard.TowerOptimizer(O.LossScaleOptimizer(_averaging()), 1),
    ],
    ids=["cross", "tower"],
)
def test_swapped_through_a_loss_scale_optimizer(make):
    """`evaluate` sees the averages, as with plain Keras on one device."""
    losses, weights = _fit(make, replicas.mirrored(2))
    want_losses, want_weights = _alone()
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    np.testing.assert_allclose(weights, want_weights, atol=1e-6)


@pytest.mark.parametrize("is_nested", [False, True])
def test_agn_refuses_to_swap_them(is_nested):
    def make():
        agn = tf_xshard.AGNOptimizer(_averaging(), communication_period=2)
        return tf_xshard.TowerOptimizer(agn, 1) if is_nested else agn

    with pytest.raises(ValueError, match="SwapEMAWeights can't .*AGNOptimizer"):
        _fit(make, replicas.mirrored(2))
