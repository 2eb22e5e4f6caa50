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
from tests.support import v1_oracle
from tf_xshard.compat import v1

tf1 = tensorflow.compat.v1


class _Momentum(tf.train.Optimizer):
    """An optimizer in the manner of BERT's, which makes its own variables."""

    def __init__(self):
        super().__init__(False, "Momentum")

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        assignments = []
        for grad, param in grads_and_vars:
            m = tf.get_variable(
                f"{param.name.removesuffix(':0')}/m",
                shape=param.shape.as_list(),
                trainable=False,
                initializer=tf.zeros_initializer(),
            )
            next_m = 0.9 * m + grad
            assignments += [param.assign_sub(0.1 * next_m), m.assign(next_m)]
        return tf.group(*assignments)


def _model_fn(features, labels, mode, params):
    loss = tf.reduce_mean(tf.square(linear.predicted(features) - labels))
    global_step = tf.train.get_or_create_global_step()
    optimizer = tf.contrib.tpu.CrossShardOptimizer(_Momentum())
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
    """It names variables by the parameters', and counts the steps itself."""
    estimator = linear.make(tmp_path, 4, _model_fn)
    estimator.train(linear.input_fn, steps=8)
    assert estimator.get_variable_value("global_step") == 8
    oracle = v1_oracle.Momentum(np.zeros([4, 1]))
    for step in range(8):
        gradients = []
        for shard in range(4):
            part = (8 * step + 2 * shard + np.arange(2)) % 32
            x, y = linear.ROWS[part], linear.Y[part]
            gradient = 2 * x.T @ (x @ oracle.x - y) / 2
            # Not from compute_gradients, so clipped in each shard and summed.
            gradients.append(gradient / max(1, np.linalg.norm(gradient)))
        oracle.apply(sum(gradients))
    np.testing.assert_allclose(linear.weights(estimator), oracle.x, rtol=1e-4)


_LAYERS = """
import tf_xshard.compat.v1.tensorflow as tf

def computation(x):
    y = tf.layers.Dense(
        1, use_bias=False, kernel_initializer=tf.zeros_initializer())(x)
    loss = tf.losses.mean_squared_error(5 * x, y)
    return tf.tpu.CrossShardOptimizer(
        tf.train.GradientDescentOptimizer(0.125)).minimize(loss)

with tf.Graph().as_default(), tf.Session() as session:
    x = tf.constant([[1.0], [2.0], [3.0], [4.0]])
    train = tf.tpu.shard(computation, [x], num_shards=2)
    session.run(tf.global_variables_initializer())
    session.run(train)
    for variable in tf.trainable_variables():
        print(variable.op.name, session.run(variable).item())
"""


def test_layers_of_keras_2():
    run = processes.run(
        processes.python("-c", _LAYERS),
        check=True,
        env={**os.environ, "TF_USE_LEGACY_KERAS": "1"},
    )
    # The gradient is -2 * 5 * mean(x**2), and that mean is 7.5.
    assert run.stdout.split() == ["dense/kernel", "9.375"]


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
