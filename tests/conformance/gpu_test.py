"""Steps that XLA compiles for a GPU, as those of `fit` on one GPU are."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard

OPTIMIZERS = {
    "cross_shard": tf_xshard.CrossShardOptimizer,
    "tower": partial(tf_xshard.TowerOptimizer, num_towers=2),
    "agn": partial(tf_xshard.AGNOptimizer, communication_period=2),
    "skipping": partial(tf_xshard.CrossShardOptimizer, skip_nonfinite=True),
}


def _trained(device, name, jit_compile):
    """Weights and state after seven steps."""
    rng = np.random.default_rng(0)
    with tf.device(device):
        weight = keras.Variable(np.ones([3, 2], "float32"))
        optimizer = OPTIMIZERS[name](
            keras.optimizers.Adam(0.1, global_clipnorm=1.0)
        )
        optimizer.build([weight])

        @tf.function(autograph=False, jit_compile=jit_compile)
        def step(gradient):
            optimizer.apply([gradient], [weight])

        for _ in range(7):
            step(tf.constant(rng.normal(size=[3, 2]), "float32"))
    # TensorFlow keeps int32 variables on the CPU, where XLA can't read them.
    assert not [v.path for v in optimizer.variables if v.dtype == "int32"]
    return [v.numpy() for v in [weight, *optimizer.variables]]


@pytest.mark.parametrize("device", ["CPU:0", "GPU:0"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_xla_compiles(name, device):
    if device == "GPU:0" and not tf.config.get_visible_devices("GPU"):
        pytest.skip("needs an accelerator: a GPU, and --gpu")
    for one, other in zip(
        _trained(device, name, jit_compile=True),
        _trained("CPU:0", name, jit_compile=False),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
