"""TPU scripts of which only the import is changed."""

import importlib
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.support import linear_estimator as linear
from tests.support import paths
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


# In the manner of tensorflow/tpu's MNIST example: layers, and all modes.
_LAYERS = """
import random, sys
random.seed(1)  # tf_keras draws the seeds of its initializers from here.
import numpy as np
import tf_xshard.compat.v1.tensorflow as tf

def model_fn(features, labels, mode, params):
    y = tf.layers.Conv2D(4, 3, padding="same", activation="relu")(
        features / 16.0)
    y = tf.layers.MaxPooling2D((2, 2), (2, 2), padding="same")(y)
    y = tf.layers.Flatten()(y)
    y = tf.layers.Dense(16, activation="relu")(y)
    y = tf.layers.Dropout(0.1)(
        y, training=(mode == tf.estimator.ModeKeys.TRAIN))
    logits = tf.layers.Dense(10)(y)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.tpu.TPUEstimatorSpec(
            mode, predictions={"class_ids": tf.argmax(logits, axis=1)})
    loss = tf.losses.sparse_softmax_cross_entropy(labels=labels, logits=logits)
    if mode == tf.estimator.ModeKeys.TRAIN:
        rate = tf.train.exponential_decay(
            0.1, tf.train.get_global_step(), decay_steps=1000, decay_rate=0.96)
        optimizer = tf.tpu.CrossShardOptimizer(
            tf.train.GradientDescentOptimizer(rate))
        return tf.estimator.tpu.TPUEstimatorSpec(
            mode=mode, loss=loss,
            train_op=optimizer.minimize(loss, tf.train.get_global_step()))
    return tf.estimator.tpu.TPUEstimatorSpec(
        mode=mode, loss=loss, eval_metrics=(
            lambda labels, logits: {"accuracy": tf.metrics.accuracy(
                labels, tf.argmax(logits, axis=1))}, [labels, logits]))

from sklearn import datasets
images, labels = datasets.load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype(np.float32)

def data(rows):
    return tf.data.Dataset.from_tensor_slices((images[rows], labels[rows]))

def train_input_fn(params):
    return data(slice(1500)).repeat().shuffle(500, seed=1).batch(
        params["batch_size"], drop_remainder=True)

def eval_input_fn(params):
    return data(slice(1500, None)).batch(params["batch_size"])

estimator = tf.estimator.tpu.TPUEstimator(
    model_fn=model_fn, use_tpu=True, train_batch_size=64, eval_batch_size=64,
    predict_batch_size=64, model_dir=sys.argv[1],
    config=tf.estimator.tpu.RunConfig(
        tpu_config=tf.estimator.tpu.TPUConfig(50, 4), tf_random_seed=1))
estimator.train(input_fn=train_input_fn, max_steps=400)
accuracy = estimator.evaluate(input_fn=eval_input_fn)["accuracy"]
ids = [one["class_ids"] for one in estimator.predict(input_fn=eval_input_fn)]
print(accuracy, np.mean(np.array(ids) == labels[1500:]),
      "conv2d/kernel" in estimator.get_variable_names())
"""


def test_layers_of_keras_2(tmp_path):
    """tf_keras is installed here: pip would add all of `tensorflow` to it."""
    version = "==" + ".".join(tf.__version__.split(".")[:2]) + ".*"
    if "rc" in tf.__version__:
        version = ""  # Keras 2 follows the releases of TensorFlow.
    packages = str(tmp_path / "packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        + ["--target", packages, f"tf_keras{version}"],
        check=True,
        timeout=500,
    )
    run = subprocess.run(
        [sys.executable, "-c", _LAYERS, str(tmp_path / "model")],
        env={
            **os.environ,
            "TF_USE_LEGACY_KERAS": "1",
            "PYTHONPATH": os.pathsep.join([str(paths.ROOT), packages]),
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    accuracy, of_predictions, has_names = run.stdout.split()
    # A float32 mean, and one of float64.
    assert abs(float(accuracy) - float(of_predictions)) < 1e-6
    # 0.85 with this seed, 0.77 to 0.86 with others; chance is 0.1.
    assert float(accuracy) > 0.7 and has_names == "True"


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
