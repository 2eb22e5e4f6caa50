"""TPU scripts of which only the import is changed."""

import importlib
import os

import numpy as np
import pytest
import tensorflow as tf

from tests.support import linear_estimator as linear
from tests.support import processes
from tf_xshard.compat import v1

tf1 = tf.compat.v1


# What is changed in each of these scripts is the import.
_BERTS_WAY = """
import re
import tf_xshard.compat.v1.tensorflow as tf

class WeightDecay(tf.train.Optimizer):
    def __init__(self, learning_rate):
        super().__init__(False, "WeightDecay")
        self.learning_rate = tf.identity(learning_rate, name="learning_rate")

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        assignments = []
        for grad, param in grads_and_vars:
            name = re.match("^(.*):\\\\d+$", param.name).group(1)
            m = tf.get_variable(
                name=name + "/adam_m", shape=param.shape.as_list(),
                dtype=tf.float32, trainable=False,
                initializer=tf.zeros_initializer())
            next_m = 0.9 * m + 0.1 * grad
            update = next_m + (0.01 * param if "bias" not in name else 0.0)
            assignments += [param.assign(param - self.learning_rate * update),
                            m.assign(next_m)]
        return tf.group(*assignments)

def model_fn(features, labels, mode, params):
    kernel = tf.get_variable(
        "kernel", [3, 1], initializer=tf.zeros_initializer())
    bias = tf.get_variable("bias", [1], initializer=tf.zeros_initializer())
    loss = tf.reduce_mean(tf.square(features["x"] @ kernel + bias - labels))
    global_step = tf.train.get_or_create_global_step()
    rate = tf.train.polynomial_decay(
        tf.constant(0.2), global_step, 10, end_learning_rate=0.0)
    steps = tf.cast(global_step, tf.float32)
    warm = tf.cast(steps < 3, tf.float32)
    rate = (1 - warm) * rate + warm * 0.2 * steps / 3
    optimizer = tf.contrib.tpu.CrossShardOptimizer(WeightDecay(rate))
    tvars = tf.trainable_variables()
    grads = tf.gradients(loss, tvars)
    grads, _ = tf.clip_by_global_norm(grads, clip_norm=1.0)
    train_op = optimizer.apply_gradients(
        zip(grads, tvars), global_step=global_step)
    train_op = tf.group(train_op, [global_step.assign(global_step + 1)])
    return tf.contrib.tpu.TPUEstimatorSpec(
        mode=mode, loss=loss, train_op=train_op)
"""


def test_an_optimizer_in_the_manner_of_berts(tmp_path):
    """Schedule, warm-up, decay by name, and a step that it counts itself."""
    script = {}
    exec(_BERTS_WAY, script)
    estimator = linear.make(tmp_path, 4, script["model_fn"])
    estimator.train(linear.input_fn, steps=8)
    assert estimator.get_variable_value("global_step") == 8
    weights, m = np.zeros([4, 1]), np.zeros([4, 1])
    rows = np.concatenate([linear.X, np.ones([32, 1])], axis=1).astype(
        np.float64
    )
    for step in range(8):
        gradient = np.zeros([4, 1])
        for shard in range(4):
            part = (8 * step + 2 * shard + np.arange(2)) % 32
            x, y = rows[part], linear.Y[part]
            # Not from compute_gradients, so clipped in each shard and summed.
            one = 2 * x.T @ (x @ weights - y) / 2
            gradient += one / max(1, np.linalg.norm(one))
        rate = 0.2 * step / 3 if step < 3 else 0.2 * (1 - step / 10)
        m = 0.9 * m + 0.1 * gradient
        weights = weights - rate * (
            m + 0.01 * weights * np.float64([[1], [1], [1], [0]])
        )
    np.testing.assert_allclose(linear.weights(estimator), weights, rtol=1e-4)


_LAYERS = """
import sys
import numpy as np
import tf_xshard.compat.v1.tensorflow as tf

def model_fn(features, labels, mode, params):
    y = tf.layers.Dense(
        1, use_bias=False, kernel_initializer=tf.zeros_initializer())(features)
    loss = tf.losses.mean_squared_error(labels, y)
    if mode == tf.estimator.ModeKeys.EVAL:
        return tf.estimator.tpu.TPUEstimatorSpec(mode, loss=loss)
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
    train_batch_size=4, eval_batch_size=4)
estimator.train(input_fn)
print(estimator.get_variable_value("dense/kernel").item(),
      estimator.evaluate(input_fn)["loss"])
"""


def test_layers_of_keras_2(tmp_path):
    run = processes.run(
        processes.python("-c", _LAYERS, str(tmp_path)),
        check=True,
        env={**os.environ, "TF_USE_LEGACY_KERAS": "1"},
    )
    kernel, loss = map(float, run.stdout.split())
    # The gradient is -2 * 5 * mean(x**2), of 7.5; the loss is 7.5 * 4.375**2.
    np.testing.assert_allclose([kernel, loss], [9.375, 7.5 * 4.375**2])


def test_the_module_with_the_old_names():
    import tf_xshard.compat.v1.tensorflow as as_tf1

    # Not a package, whose submodules would be TensorFlow's.
    with pytest.raises(ImportError):
        importlib.import_module("tf_xshard.compat.v1.tensorflow.tpu")
    assert as_tf1.tpu.CrossShardOptimizer is v1.CrossShardOptimizer
    assert {"float32", "layers", "tpu"} < set(dir(as_tf1))

    with pytest.raises(ImportError, match="pip install tf_keras==2"):
        _ = as_tf1.layers
    with pytest.raises(AttributeError, match="tf.estimator has no 'Estimator'"):
        _ = as_tf1.estimator.Estimator
    replaced = {"contrib", "estimator", "layers", "tpu"}
    for name in set(dir(tf1)) - replaced:
        if not name.startswith("_"):
            assert getattr(as_tf1, name) is getattr(tf1, name), name
    assert as_tf1.tpu.replicate is tf1.tpu.replicate
    assert as_tf1.contrib.opt.AGNOptimizer is v1.AGNOptimizer
