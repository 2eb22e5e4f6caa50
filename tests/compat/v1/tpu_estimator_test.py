"""TPUEstimator's model_fn, driven with no TPU and no Estimator package."""

import gc
import os
import weakref

import numpy as np
import tensorflow as tf

from tests.compat.v1 import graphs
from tests.support import linear_estimator as linear
from tf_xshard.compat import v1
from tf_xshard.compat.v1.sharding import copies as shard_copies

tf1 = tf.compat.v1


def test_shards_train_as_one_device(tmp_path):
    estimator = linear.make(tmp_path)
    assert estimator.train(linear.input_fn, max_steps=4) is estimator
    # It goes on from the checkpoint, by a number of steps or up to one. Four
    # steps end an epoch, and each call begins with the first batch.
    estimator.train(linear.input_fn, steps=4)
    for _ in range(2):
        estimator.train(linear.input_fn, max_steps=10)
    weights = linear.weights(estimator, "dense/")
    np.testing.assert_allclose(weights, linear.adam(10), rtol=3e-5)
    assert estimator.latest_checkpoint().endswith("ckpt-10")
    assert estimator.get_variable_value("global_step") == 10
    assert "dense/kernel/Adam" in estimator.get_variable_names()

    # The metrics are of rows; the loss, as documented, the mean over batches.
    y = linear.X @ weights[:3] + weights[3]
    squares, mae = (y - linear.Y) ** 2, np.mean(np.abs(y - linear.Y))
    of_batches = [np.mean(squares[i : i + 12]) for i in (0, 12, 24)]
    uneven = linear.make(tmp_path, eval_batch_size=12).evaluate(linear.once)
    results = estimator.evaluate(linear.once)
    half = estimator.evaluate(linear.once, steps=2, name="half")
    assert os.listdir(tmp_path / "eval_half")
    graphs.check_close(
        [
            [one["loss"] for one in (uneven, results, half)],
            [one["mae"] for one in (uneven, results)],
        ],
        [
            [np.mean(of_batches), np.mean(squares), np.mean(squares[:16])],
            [mae, mae],
        ],
        1e-5,
        0,
    )
    assert results["global_step"] == 10

    rows = list(estimator.predict(linear.once))
    np.testing.assert_allclose([row["y"] for row in rows], y, rtol=1e-4)
    np.testing.assert_array_equal(
        [row["first"] for row in rows], linear.X[:, 0]
    )
    [batch, *_] = estimator.predict(
        linear.once, predict_keys="first", yield_single_examples=False
    )
    assert list(batch) == ["first"] and batch["first"].shape == (8,)
    old = estimator.evaluate(
        linear.once, checkpoint_path=str(tmp_path / "model.ckpt-4")
    )
    assert old["global_step"] == 4 and old["loss"] > results["loss"]


def test_features_only(tmp_path):
    """Labels are optional everywhere, and `predict` drops them.

    A train_op may be a tensor, and a host_call may return nothing.
    """
    called = []

    def fn(features, mode):
        w = tf1.get_variable("w", [], initializer=tf1.ones_initializer())
        if mode == v1.ModeKeys.PREDICT:
            return v1.TPUEstimatorSpec(mode, predictions=w * features["x"])
        loss = w * tf.reduce_mean(tf.square(features["x"]))
        optimizer = v1.CrossShardOptimizer(
            tf1.train.GradientDescentOptimizer(0.5)
        )
        train_op = optimizer.minimize(loss, tf1.train.get_global_step())
        with tf.control_dependencies([train_op]):
            seven = tf.constant(7.0) * 1
        spec = v1.TPUEstimatorSpec(
            mode, loss=loss, train_op=seven, host_call=(called.append, [loss])
        )
        assert spec.as_estimator_spec().train_op.type == "NoOp"
        called.clear()
        return spec

    estimator = linear.make(tmp_path, fn=fn)
    estimator.train(lambda: {"x": tf.constant(linear.X)}, steps=2)
    assert len(called) == 1
    w = 1 - 2 * 0.5 * np.mean(linear.X**2)
    np.testing.assert_allclose(estimator.get_variable_value("w"), w, rtol=1e-5)
    rows = list(estimator.predict(linear.once))
    np.testing.assert_allclose(rows, w * linear.X, rtol=1e-4)


def test_graphs_are_not_kept(tmp_path, monkeypatch):
    """Each call of train makes one, of megabytes for a large model."""
    estimator = linear.make(tmp_path)
    made = []
    copies_of = shard_copies.of

    def recorded(graph):
        made.append(weakref.ref(graph))
        return copies_of(graph)

    monkeypatch.setattr(shard_copies, "of", recorded)
    for _ in range(2):
        estimator.train(linear.input_fn, steps=1)
    assert len(made) >= 2
    gc.collect()
    assert not [graph for graph in made if graph() is not None]
