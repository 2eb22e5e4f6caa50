"""A linear model as a TPUEstimator trains it, with its data."""

import numpy as np
import tensorflow as tf

from tests.support import v1_oracle
from tf_xshard.compat import v1

tf1 = tf.compat.v1
RNG = np.random.default_rng(7)
X = RNG.normal(size=(32, 3)).astype("float32")
Y = (X @ np.float32([[1.0], [-2.0], [0.5]]) + 0.25).astype("float32")
# The features as oracles have them: the last one is multiplied by the bias.
ROWS = np.concatenate([X, np.ones([32, 1])], axis=1).astype(np.float64)


def predicted(features):
    kernel = tf1.get_variable("kernel", [3, 1], initializer=tf.zeros)
    bias = tf1.get_variable("bias", [1], initializer=tf.zeros)
    return features["x"] @ kernel + bias


def model_fn(features, labels, mode, params):
    """In the manner of a TPU's model_fn: metrics and host_call on the host."""
    y = predicted(features)
    if mode == v1.ModeKeys.PREDICT:
        predictions = {"y": y, "first": features["x"][:, 0]}
        return v1.TPUEstimatorSpec(mode, predictions)
    loss = tf.reduce_mean(tf.square(y - labels))
    if mode == v1.ModeKeys.EVAL:
        mae = tf1.metrics.mean_absolute_error
        metrics = lambda labels, y: {"mae": mae(labels, y)}
        on_host = (metrics, {"labels": labels, "y": y})
        return v1.TPUEstimatorSpec(mode, loss=loss, eval_metrics=on_host)
    assert labels.shape[0] == params["batch_size"]
    adam = tf1.train.AdamOptimizer(params["learning_rate"])
    step = tf1.train.get_global_step()
    train_op = v1.CrossShardOptimizer(adam).minimize(loss, step)
    return v1.TPUEstimatorSpec(mode, loss=loss, train_op=train_op)


def _data():
    return tf.data.Dataset.from_tensor_slices(({"x": X}, Y))


def input_fn(params):
    """Batches of the global size, over and over."""
    return _data().repeat().batch(params["batch_size"], drop_remainder=True)


def once(params):
    """The same data once; the last batch is smaller if it has to be."""
    return _data().batch(params["batch_size"])


def weights(estimator):
    """The kernel and, below it, the bias."""
    value = estimator.get_variable_value
    return np.concatenate([value("kernel"), value("bias")[None]])


def make(directory, num_shards=2, fn=model_fn, config=(), **kwargs):
    """An estimator; `config` has further arguments of RunConfig."""
    shards = v1.TPUConfig(num_shards=np.int64(num_shards))
    sizes = ("train_batch_size", "eval_batch_size", "predict_batch_size")
    defaults = {**dict.fromkeys(sizes, 8), "params": {"learning_rate": 0.1}}
    config = v1.RunConfig(shards, model_dir=str(directory), **dict(config))
    return v1.TPUEstimator(fn, config=config, **{**defaults, **kwargs})


def adam(num_steps):
    """The kernel and the bias after some steps on the global batches."""
    oracle = v1_oracle.Adam(np.zeros([4, 1]))
    for step in range(num_steps):
        part = np.arange(8 * step, 8 * step + 8) % 32
        x, y = ROWS[part], Y[part]
        oracle.apply(2 * x.T @ (x @ oracle.x - y) / 8)
    return oracle.x
