"""TPU scripts of which only the import is changed."""

import importlib
import os

import numpy as np
import pytest
import tensorflow

# A script's only change; it was `import tensorflow as tf`.
import tf_xshard.compat.v1.tensorflow as tf
from tests.support import linear_estimator as linear
from tests.support import processes
from tf_xshard.compat import v1

tf1 = tensorflow.compat.v1


class _WeightDecay(tf.train.Optimizer):
    """An optimizer in the manner of BERT's."""

    def __init__(self, learning_rate):
        super().__init__(False, "WeightDecay")
        self.learning_rate = tf.identity(learning_rate, name="learning_rate")

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        assignments = []
        for grad, param in grads_and_vars:
            name = param.name.removesuffix(":0")
            m = tf.get_variable(
                f"{name}/adam_m",
                shape=param.shape.as_list(),
                trainable=False,
                initializer=tf.zeros_initializer(),
            )
            next_m = 0.9 * m + 0.1 * grad
            update = next_m + (0.01 * param if "bias" not in name else 0.0)
            param_op = param.assign(param - self.learning_rate * update)
            assignments += [param_op, m.assign(next_m)]
        return tf.group(*assignments)


def _model_fn(features, labels, mode, params):
    loss = tf.reduce_mean(tf.square(linear.predicted(features) - labels))
    global_step = tf.train.get_or_create_global_step()
    rate = tf.train.polynomial_decay(
        tf.constant(0.2), global_step, 10, end_learning_rate=0.0
    )
    optimizer = tf.contrib.tpu.CrossShardOptimizer(_WeightDecay(rate))
    tvars = tf.trainable_variables()
    grads, _ = tf.clip_by_global_norm(tf.gradients(loss, tvars), clip_norm=1.0)
    train_op = optimizer.apply_gradients(
        zip(grads, tvars, strict=True), global_step=global_step
    )
    train_op = tf.group(train_op, [global_step.assign(global_step + 1)])
    return tf.contrib.tpu.TPUEstimatorSpec(
        mode=mode, loss=loss, train_op=train_op
    )


def test_an_optimizer_in_the_manner_of_berts(tmp_path):
    """A schedule, decay by name, and a step that it counts itself."""
    estimator = linear.make(tmp_path, 4, _model_fn)
    estimator.train(linear.input_fn, steps=8)
    assert estimator.get_variable_value("global_step") == 8
    weights, m = np.zeros([4, 1]), np.zeros([4, 1])
    for step in range(8):
        gradient = np.zeros([4, 1])
        for shard in range(4):
            part = (8 * step + 2 * shard + np.arange(2)) % 32
            x, y = linear.ROWS[part], linear.Y[part]
            # Not from compute_gradients, so clipped in each shard and summed.
            one = 2 * x.T @ (x @ weights - y) / 2
            gradient += one / max(1, np.linalg.norm(one))
        rate = 0.2 * (1 - step / 10)
        m = 0.9 * m + 0.1 * gradient
        decay = 0.01 * weights * [[1], [1], [1], [0]]
        weights = weights - rate * (m + decay)
    np.testing.assert_allclose(linear.weights(estimator), weights, rtol=1e-4)


_LAYERS = """
import sys
import numpy as np
import tf_xshard.compat.v1.tensorflow as tf

def model_fn(features, labels, mode, params):
    y = tf.layers.Dense(
        1, use_bias=False, kernel_initializer=tf.zeros_initializer())(features)
    loss = tf.losses.mean_squared_error(labels, y)
    optimizer = tf.tpu.CrossShardOptimizer(
        tf.train.GradientDescentOptimizer(0.125))
    return tf.estimator.tpu.TPUEstimatorSpec(
        mode, loss=loss,
        train_op=optimizer.minimize(loss, tf.train.get_global_step()))

def input_fn(params):
    x = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)
    return tf.data.Dataset.from_tensors((x, 5 * x))

estimator = tf.estimator.tpu.TPUEstimator(
    model_fn, sys.argv[1], tf.estimator.tpu.RunConfig(
        tpu_config=tf.estimator.tpu.TPUConfig(num_shards=2)),
    train_batch_size=4)
estimator.train(input_fn)
print(estimator.get_variable_value("dense/kernel").item())
"""


def test_layers_of_keras_2(tmp_path):
    run = processes.run(
        processes.python("-c", _LAYERS, str(tmp_path)),
        check=True,
        env={**os.environ, "TF_USE_LEGACY_KERAS": "1"},
    )
    # The gradient is -2 * 5 * mean(x**2), and that mean is 7.5.
    assert float(run.stdout) == 9.375


def test_the_module_with_the_old_names():
    # Not a package, whose submodules would be TensorFlow's.
    with pytest.raises(ImportError):
        importlib.import_module("tf_xshard.compat.v1.tensorflow.tpu")
    assert tf.tpu.CrossShardOptimizer is v1.CrossShardOptimizer
    assert {"float32", "layers", "tpu"} < set(dir(tf))

    with pytest.raises(ImportError, match="pip install tf_keras==2"):
        _ = tf.layers
    with pytest.raises(AttributeError, match="tf.estimator has no 'Estimator'"):
        _ = tf.estimator.Estimator
    replaced = {"contrib", "estimator", "layers", "tpu"}
    for name in set(dir(tf1)) - replaced:
        if not name.startswith("_"):
            assert getattr(tf, name) is getattr(tf1, name), name
    assert tf.tpu.replicate is tf1.tpu.replicate
    assert tf.contrib.opt.AGNOptimizer is v1.AGNOptimizer
