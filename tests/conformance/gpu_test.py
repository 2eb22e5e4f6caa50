"""Steps that XLA compiles for a GPU, as those of `fit` on one GPU are."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard

OPTIMIZERS = {
    "plain": lambda optimizer: optimizer,
    "cross_shard": tf_xshard.CrossShardOptimizer,
    "tower": lambda optimizer: tf_xshard.TowerOptimizer(optimizer, 2),
    "agn": lambda optimizer: tf_xshard.AGNOptimizer(
        optimizer, communication_period=2
    ),
    "skipping": lambda optimizer: tf_xshard.CrossShardOptimizer(
        optimizer, skip_nonfinite=True
    ),
}


def _trained(device, name, jit_compile):
    """Weights and state after seven steps."""
    rng = np.random.default_rng(0)
    with tf.device(device):
        weights = [keras.Variable(np.ones(s, "float32")) for s in ((3, 2), ())]
        optimizer = OPTIMIZERS[name](
            keras.optimizers.Adam(0.1, global_clipnorm=1.0)
        )
        optimizer.build(weights)

        @tf.function(autograph=False, jit_compile=jit_compile)
        def step(*gradients):
            optimizer.apply(gradients, weights)

        for _ in range(7):
            step(
                *(
                    tf.constant(rng.normal(size=w.shape), "float32")
                    for w in weights
                )
            )
    return [v.numpy() for v in [*weights, *optimizer.variables]]


def _check(device, name):
    expected = _trained("CPU:0", name, jit_compile=False)
    for one, other in zip(
        _trained(device, name, jit_compile=True), expected, strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_compiled_for_a_gpu(name):
    if not tf.config.get_visible_devices("GPU"):
        pytest.skip("needs an accelerator: a GPU, and --gpu")
    _check("GPU:0", name)


def test_no_counter_is_on_the_cpu_of_a_gpu():
    """TensorFlow keeps int32 variables there, where XLA can't read them."""
    for make in OPTIMIZERS.values():
        weight = keras.Variable(1.0)
        optimizer = make(keras.optimizers.Adam(0.1))
        optimizer.apply([tf.constant(1.0)], [weight])
        assert not [v.path for v in optimizer.variables if v.dtype == "int32"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_compiled_for_a_cpu(name):
    _check("CPU:0", name)
