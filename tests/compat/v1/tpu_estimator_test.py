"""TPUEstimator's model_fn and hooks, with no TPU and no Estimator package."""

import functools
import gc
import os
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tests.compat.v1 import graphs
from tests.support import linear_estimator as linear
from tf_xshard.compat import v1

tf1 = tf.compat.v1


def _model_fn(changed):
    """The linear model_fn, of whose spec `changed` makes another."""

    def fn(features, labels, mode, params):
        return changed(linear.model_fn(features, labels, mode, params))

    return fn


class _Called(tf1.train.SessionRunHook):
    """Notes each step; may stop the loop."""

    def __init__(self, lines, name="step", num_steps=None):
        self.lines, self.name, self.num_steps = lines, name, num_steps

    def begin(self):
        self.count = 0

    def after_run(self, run_context, run_values):
        self.lines.append(self.name)
        self.count += 1
        if self.count == self.num_steps:
            run_context.request_stop()


def test_shards_train_as_one_device(tmp_path):
    estimator = linear.make(tmp_path)
    assert estimator.train(linear.input_fn, max_steps=4) is estimator
    # It goes on from the checkpoint, by a number of steps or up to one. Four
    # steps end an epoch, and each call begins with the first batch.
    estimator.train(linear.input_fn, steps=4)
    for _ in range(2):
        estimator.train(linear.input_fn, max_steps=10)
    weights = linear.weights(estimator)
    np.testing.assert_allclose(weights, linear.adam(10), rtol=3e-5)
    assert estimator.latest_checkpoint().endswith("ckpt-10")
    assert estimator.get_variable_value("global_step") == 10
    assert "kernel/Adam" in estimator.get_variable_names()

    # The metrics are of rows; the loss, as documented, the mean over batches.
    y = linear.ROWS @ weights
    squares, mae = (y - linear.Y) ** 2, np.mean(np.abs(y - linear.Y))
    of_batches = [np.mean(squares[i : i + 12]) for i in (0, 12, 24)]
    uneven = linear.make(tmp_path, eval_batch_size=12).evaluate(linear.once)
    results = estimator.evaluate(linear.once)
    half = estimator.evaluate(linear.once, steps=2, name="half")
    assert os.listdir(tmp_path / "eval_half")
    losses = [one["loss"] for one in (uneven, results, half)]
    expected = map(np.mean, (of_batches, squares, squares[:16]))
    np.testing.assert_allclose(losses, list(expected), rtol=1e-5)
    maes = [uneven["mae"], results["mae"]]
    np.testing.assert_allclose(maes, [mae, mae], rtol=1e-5)
    assert results["global_step"] == 10

    rows = list(estimator.predict(linear.once))
    np.testing.assert_allclose([row["y"] for row in rows], y, rtol=1e-4)
    first = [row["first"] for row in rows]
    np.testing.assert_array_equal(first, linear.X[:, 0])
    options = {"predict_keys": "first", "yield_single_examples": False}
    [batch, *_] = estimator.predict(linear.once, **options)
    assert list(batch) == ["first"] and batch["first"].shape == (8,)
    path = str(tmp_path / "model.ckpt-4")
    old = estimator.evaluate(linear.once, checkpoint_path=path)
    assert old["global_step"] == 4 and old["loss"] > results["loss"]


def test_features_only(tmp_path):
    """Labels are optional everywhere, and `predict` drops them.

    A train_op may be a tensor, and a host_call may return nothing.
    """
    called = []

    def fn(features, mode):
        w = tf1.get_variable("w", [], initializer=tf.ones)
        if mode == v1.ModeKeys.PREDICT:
            return v1.TPUEstimatorSpec(mode, predictions=w * features["x"])
        loss = w * tf.reduce_mean(tf.square(features["x"]))
        optimizer = v1.CrossShardOptimizer(graphs.descent(0.5))
        train_op = optimizer.minimize(loss, tf1.train.get_global_step())
        with tf.control_dependencies([train_op]):
            seven = tf.constant(7.0) * 1
        host_call = (lambda loss: called.append(loss.shape), [loss[None]])
        return v1.TPUEstimatorSpec(
            mode, loss=loss, train_op=seven, host_call=host_call
        )

    estimator = linear.make(tmp_path, fn=fn)
    estimator.train(lambda: {"x": tf.constant(linear.X)}, steps=2)
    assert called == [[2]]
    w = 1 - 2 * 0.5 * np.mean(linear.X**2)
    np.testing.assert_allclose(estimator.get_variable_value("w"), w, rtol=1e-5)
    rows = list(estimator.predict(linear.once))
    np.testing.assert_allclose(rows, w * linear.X, rtol=1e-4)


def test_calls_on_the_host(tmp_path):
    """host_call, scaffold_fn, hooks and summaries, as TPU scripts have them."""
    lines = []

    def on_host(losses, step):
        writer = tf.summary.create_file_writer(str(tmp_path / "host"))
        with writer.as_default(step=step[0]):
            tf.summary.write("losses", losses)
        return [tf1.summary.all_v2_summary_ops(), writer.flush()]

    def from_first():
        path = tf.train.latest_checkpoint(str(tmp_path / "first"))
        # Fine-tuning, as BERT does it: by variables' names.
        names = [v.op.name for v in tf1.trainable_variables()]
        assert sorted(names) == ["bias", "kernel"]
        tf1.train.init_from_checkpoint(path, {n: n for n in names})
        saver = tf1.train.Saver(max_to_keep=1)
        tf1.add_to_collection(tf1.GraphKeys.SAVERS, saver)
        return tf1.train.Scaffold()

    def with_calls(spec):
        tensors = [spec.loss[None], tf1.train.get_global_step()[None]]
        return spec._replace(
            host_call=(on_host, tensors),
            scaffold_fn=from_first,
            training_hooks=[_Called(lines)],
        )

    first = linear.make(tmp_path / "first")
    first.train(linear.input_fn, steps=3)
    directory, rate = tmp_path / "tuned", {"learning_rate": 0}
    tuned = linear.make(directory, fn=_model_fn(with_calls), params=rate)
    tuned.train(linear.input_fn, steps=2, hooks=[_Called(lines)])
    # The script's own Saver keeps one.
    assert len(list(directory.glob("*.index"))) == 1
    weights = linear.weights(first)
    np.testing.assert_array_equal(linear.weights(tuned), weights)
    assert len(lines) == 4
    [events] = (tmp_path / "host").iterdir()
    written = [
        tf.make_ndarray(value.tensor)
        for event in tf1.train.summary_iterator(str(events))
        for value in event.summary.value
    ]
    # The losses of both shards, in both steps.
    squares = (linear.ROWS @ weights - linear.Y)[:16] ** 2
    losses = squares.reshape(2, 2, 4).mean(-1)
    np.testing.assert_allclose(written, losses, rtol=1e-5)


def test_hooks_and_limits(tmp_path):
    """Hooks of a call and of an EstimatorSpec; checkpoints in between."""
    lines = []

    def with_hooks(spec):
        spec = spec.as_estimator_spec()
        assert isinstance(spec, v1.EstimatorSpec)
        return spec._replace(
            # This process is the chief.
            training_chief_hooks=(_Called(lines, "chief"),),
            training_hooks=[_Called(lines, "train")],
            evaluation_hooks=[_Called(lines, "eval")],
            prediction_hooks=[_Called(lines, "infer")],
        )

    def stop():
        return [_Called([], num_steps=2)]

    of_checkpoints = {"save_checkpoints_steps": 2, "keep_checkpoint_max": 2}
    silent = {"save_summary_steps": 0, "log_step_count_steps": 0}
    config = {**of_checkpoints, **silent}
    estimator = linear.make(tmp_path, fn=_model_fn(with_hooks), config=config)
    # Until the input ends.
    estimator.train(lambda params: linear.input_fn(params).take(7))
    kept = tf.train.get_checkpoint_state(str(tmp_path))
    steps = [path[-1] for path in kept.all_model_checkpoint_paths]
    assert steps == ["6", "7"]
    assert not [one for one in os.listdir(tmp_path) if "events" in one]
    estimator.train(linear.input_fn, hooks=stop())
    assert estimator.get_variable_value("global_step") == 9
    errors = (linear.ROWS @ linear.weights(estimator) - linear.Y)[:16]
    found = estimator.evaluate(linear.once, hooks=stop())
    np.testing.assert_allclose(found["loss"], np.mean(errors**2), rtol=1e-5)
    assert len(list(estimator.predict(linear.once, hooks=stop()))) == 16
    assert lines == ["train", "chief"] * 9 + ["eval"] * 2 + ["infer"] * 2


class _Listening(tf1.train.CheckpointSaverListener):
    """Notes all calls, with the newest checkpoint; may stop the training."""

    def __init__(self, directory, stops_at=None):
        self.directory, self.stops_at = str(directory), stops_at
        self.lines = []

    def begin(self):
        tf.constant(1, name="a_listener_may_build")
        self.lines.append("begin")

    def _note(self, name, step):
        newest = tf.train.latest_checkpoint(self.directory) or "none"
        self.lines.append(f"{name} {step} {newest.split('ckpt-')[-1]}")

    def before_save(self, session, global_step_value):
        self._note("before", global_step_value)

    def after_save(self, session, global_step_value):
        self._note("after", global_step_value)
        return global_step_value == self.stops_at

    def end(self, session, global_step_value):
        self._note("end", global_step_value)


def test_saving_listeners(tmp_path):
    """Called around each save, in order; one of them stops the training."""
    first, second = _Listening(tmp_path, stops_at=4), _Listening(tmp_path)
    estimator = linear.make(tmp_path, config={"save_checkpoints_steps": 2})
    train = functools.partial(estimator.train, linear.input_fn)
    train(max_steps=3, saving_listeners=[first, second])
    assert first.lines == second.lines
    assert first.lines == [
        "begin",
        *("before 0 none", "after 0 0"),
        *("before 2 0", "after 2 2"),
        *("before 3 2", "after 3 3", "end 3 3"),
    ]
    stopping = _Listening(tmp_path, stops_at=5)
    train(steps=9, saving_listeners=(stopping, second))
    assert stopping.lines[-3:] == second.lines[-3:]
    assert stopping.lines[-2:] == ["after 5 5", "end 5 5"]
    with pytest.raises(TypeError, match="Pass other hooks in `hooks`"):
        train(saving_listeners=[_Called([])])
    assert estimator.get_variable_value("global_step") == 5


def test_scaffolds_params_and_all_checkpoints(tmp_path):
    """A Scaffold's own initialization, mutable params, every checkpoint.

    The graph, of megabytes for a large model, is not kept.
    """
    graphs_made = []

    def scaffold():
        local_init_op = tf1.local_variables_initializer()
        return tf1.train.Scaffold(local_init_op=local_init_op)

    def fn(features, labels, mode, params):
        graphs_made.append(weakref.ref(tf1.get_default_graph()))
        params["list"].append(1)
        spec = linear.model_fn(features, labels, mode, params)
        return spec._replace(scaffold_fn=scaffold)

    params = {"list": [], "learning_rate": 0.1}
    config = {"save_checkpoints_steps": 1, "keep_checkpoint_max": 0}
    # Without shards: CrossShardOptimizer has nothing to reduce.
    estimator = linear.make(
        tmp_path, fn=fn, use_tpu=False, params=params, config=config
    )
    estimator.train(linear.input_fn, steps=7)
    gc.collect()
    assert [one() for one in graphs_made] == [None]
    assert estimator.params["list"] == []
    assert len(list(tmp_path.glob("*.index"))) == 8
    weights = linear.weights(estimator)
    np.testing.assert_allclose(weights, linear.adam(7), rtol=3e-5)
    first = tmp_path / "model.ckpt-0"
    rows = list(estimator.predict(linear.once, checkpoint_path=first))
    assert len(rows) == 32 and not any(row["y"] for row in rows)


def test_a_loss_that_is_nan_is_not_saved(tmp_path):
    def with_nan(spec):
        step = tf.cast(tf1.train.get_global_step(), tf.float32)
        # 0 / 0 in the second step.
        return spec._replace(loss=spec.loss * (1 - step) / (1 - step))

    config = {"save_checkpoints_steps": 1}
    estimator = linear.make(tmp_path, fn=_model_fn(with_nan), config=config)
    with pytest.raises(tf1.train.NanLossDuringTrainingError):
        estimator.train(linear.input_fn, steps=3)
    assert estimator.latest_checkpoint().endswith("ckpt-1")
