"""Runs a TF1 script for a TPU without a TPU, with one import changed."""

import tempfile

import numpy as np
from sklearn import datasets

import tf_xshard.compat.v1.tensorflow as tf  # was: tensorflow.compat.v1


def model_fn(features, labels, mode, params):
    hidden = tf.get_variable("hidden", [64, 64])
    output = tf.get_variable("output", [64, 10])
    logits = tf.matmul(tf.nn.relu(tf.matmul(features, hidden)), output)
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    if mode == tf.estimator.ModeKeys.EVAL:

        def metrics(labels, logits):
            predicted = tf.argmax(logits, 1)
            return {"accuracy": tf.metrics.accuracy(labels, predicted)}

        return tf.estimator.tpu.TPUEstimatorSpec(
            mode, loss=loss, eval_metrics=(metrics, [labels, logits])
        )
    optimizer = tf.train.AdamOptimizer(params["learning_rate"])
    optimizer = tf.tpu.CrossShardOptimizer(optimizer)
    step = tf.train.get_global_step()
    return tf.estimator.tpu.TPUEstimatorSpec(
        mode, loss=loss, train_op=optimizer.minimize(loss, step)
    )


def input_fn(params):
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    return data.repeat(10).batch(params["batch_size"], drop_remainder=True)


def main():
    with tempfile.TemporaryDirectory() as directory:
        estimator = tf.estimator.tpu.TPUEstimator(
            model_fn,
            directory,
            tf.estimator.tpu.RunConfig(
                tpu_config=tf.estimator.tpu.TPUConfig(num_shards=8)
            ),
            params={"learning_rate": 0.01},
            train_batch_size=64,
            eval_batch_size=64,
        )
        estimator.train(input_fn, max_steps=200)
        accuracy = estimator.evaluate(input_fn)["accuracy"]
    print(f"8 shards: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
