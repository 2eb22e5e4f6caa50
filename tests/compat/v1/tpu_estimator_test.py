"""TPUEstimator's model_fn, driven with no TPU and no Estimator package."""

import gc
import os
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tests.support import linear_estimator as linear
from tf_xshard.compat import v1
from tf_xshard.compat.v1.sharding import copies as shard_copies

tf1 = tf.compat.v1


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_shards_train_as_one_device(num_shards, tmp_path):
    estimator = linear.make(tmp_path, num_shards)
    assert estimator.train(linear.input_fn, max_steps=6) is estimator
    # It goes on from the checkpoint, by a number of steps or up to one.
    estimator.train(linear.input_fn, steps=2).train(
        linear.input_fn, max_steps=10
    )
    estimator.train(linear.input_fn, max_steps=10)
    assert estimator.latest_checkpoint().endswith("ckpt-10")
    assert estimator.get_variable_value("global_step") == 10
    assert "dense/kernel/Adam" in estimator.get_variable_names()
    weights = linear.weights(estimator, "dense/")
    fresh = linear.make(tmp_path / "fresh", num_shards)
    fresh.train(linear.input_fn, steps=4)
    np.testing.assert_allclose(
        linear.weights(fresh, "dense/"), linear.adam(4), rtol=3e-5
    )

    # The metrics are of rows; the loss, as documented, the mean over batches.
    uneven = linear.make(tmp_path, num_shards, eval_batch_size=12)
    y = linear.X @ weights[:3] + weights[3]
    squares = (y - linear.Y) ** 2
    np.testing.assert_allclose(
        uneven.evaluate(linear.once)["loss"],
        np.mean([np.mean(squares[i : i + 12]) for i in (0, 12, 24)]),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        uneven.evaluate(linear.once)["mae"],
        np.mean(np.abs(y - linear.Y)),
        rtol=1e-5,
    )
    results = estimator.evaluate(linear.once)
    np.testing.assert_allclose(
        results["loss"], np.mean((y - linear.Y) ** 2), rtol=1e-5
    )
    np.testing.assert_allclose(
        results["mae"], np.mean(np.abs(y - linear.Y)), rtol=1e-5
    )
    assert results["global_step"] == 10
    half = estimator.evaluate(linear.once, steps=2, name="half")
    np.testing.assert_allclose(
        half["loss"], np.mean((y - linear.Y)[:16] ** 2), rtol=1e-5
    )
    assert os.listdir(tmp_path / "eval_half")

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
        linear.once, checkpoint_path=str(tmp_path / "model.ckpt-6")
    )
    assert old["global_step"] == 6 and old["loss"] > results["loss"]


def test_an_estimator_spec(tmp_path):
    """It does as well, and `as_estimator_spec` makes one."""

    def plain(features, labels, mode, params):
        spec = linear.model_fn(
            features, labels, mode, params
        ).as_estimator_spec()
        assert isinstance(spec, v1.EstimatorSpec)
        return spec

    estimator = linear.make(tmp_path, 2, plain)
    estimator.train(linear.input_fn, steps=4)
    np.testing.assert_allclose(
        estimator.get_variable_value("dense/kernel"),
        linear.adam(4)[:3],
        rtol=1e-5,
    )
    assert estimator.evaluate(linear.once)["mae"] > 0
    assert len(list(estimator.predict(linear.once))) == 32


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_features_only(num_shards, tmp_path):
    """Labels are optional everywhere, and `predict` drops them."""

    def fn(features, mode):
        w = tf1.get_variable("w", [], initializer=tf1.ones_initializer())
        if mode == v1.ModeKeys.PREDICT:
            return v1.TPUEstimatorSpec(mode, predictions=w * features["x"])
        loss = w * tf.reduce_mean(tf.square(features["x"]))
        optimizer = v1.CrossShardOptimizer(
            tf1.train.GradientDescentOptimizer(0.5)
        )
        train_op = optimizer.minimize(loss, tf1.train.get_global_step())
        return v1.TPUEstimatorSpec(mode, loss=loss, train_op=train_op)

    estimator = linear.make(tmp_path, num_shards, fn)
    estimator.train(lambda: {"x": tf.constant(linear.X)}, steps=2)
    w = 1 - 2 * 0.5 * np.mean(linear.X**2)
    np.testing.assert_allclose(estimator.get_variable_value("w"), w, rtol=1e-5)
    rows = list(estimator.predict(linear.once))
    np.testing.assert_allclose(rows, w * linear.X, rtol=1e-4)


def test_graphs_are_not_kept(tmp_path, monkeypatch):
    """Each call of train makes one, of megabytes for a large model."""
    estimator = linear.make(tmp_path, 2)
    graphs = []
    copies_of = shard_copies.of

    def recorded(graph):
        graphs.append(weakref.ref(graph))
        return copies_of(graph)

    monkeypatch.setattr(shard_copies, "of", recorded)
    for _ in range(3):
        estimator.train(linear.input_fn, steps=1)
    assert len(graphs) >= 3
    gc.collect()
    assert not [graph for graph in graphs if graph() is not None]
