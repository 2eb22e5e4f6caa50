"""Models that `fit` builds, whose variables are as new as the optimizer's."""

import keras
import numpy as np
import pytest

import tf_xshard
from tests.support import seeds
from tests.support import versions

O = keras.optimizers  # noqa: E741
WRAPPERS = {
    "cross": tf_xshard.CrossShardOptimizer,
    "tower": lambda inner: tf_xshard.TowerOptimizer(inner, 1),
    "agn": lambda inner: tf_xshard.AGNOptimizer(inner, communication_period=1),
}


def _trained(optimizer, has_input):
    seeds.seed(1)
    layers = [keras.layers.Dense(3, kernel_initializer="he_normal")]
    if has_input:
        layers.insert(0, keras.layers.Input((5,)))
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse")
    x = np.linspace(-1, 1, 40, dtype="float32").reshape(8, 5)
    model.fit(x, x[:, :3], epochs=2, batch_size=4, shuffle=False, verbose=0)
    return model.get_weights()


@versions.needs_optimizer("ScheduleFreeAdamW")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_optimizer_that_copies_weights_when_it_is_built(wrapper):
    """Its momentum begins as the weights, which must exist by then."""
    wrap = WRAPPERS[wrapper]
    with_input, without = (
        _trained(wrap(O.ScheduleFreeAdamW(0.1)), has_input)
        for has_input in (True, False)
    )
    for expected, value in zip(with_input, without, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-7)
