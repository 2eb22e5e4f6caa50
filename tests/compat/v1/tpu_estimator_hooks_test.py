"""What a TPUEstimator runs around its steps: hooks, host calls, Savers."""

import os

import numpy as np
import pytest
import tensorflow as tf

from tests.support import linear_estimator as linear
from tf_xshard.compat import v1

tf1 = tf.compat.v1


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


def test_calls_on_the_host(tmp_path):
    """host_call, scaffold_fn, hooks and summaries, as TPU scripts have them."""
    seen, lines = [], []

    def on_host(losses, step):
        assert losses.shape == [2] and step.shape == [2]
        noted = tf1.py_func(lambda *args: seen.append(args), [losses, step], [])
        writer = tf.summary.create_file_writer(str(tmp_path / "host"))
        with writer.as_default(step=step[0]):
            tf.summary.write("losses", losses)
        return [noted, tf1.summary.all_v2_summary_ops(), writer.flush()]

    def with_calls(features, labels, mode, params):
        spec = linear.model_fn(features, labels, mode, params)
        step = tf1.train.get_global_step()
        return spec._replace(
            host_call=(
                on_host,
                [tf.reshape(spec.loss, [1]), tf.reshape(step, [1])],
            ),
            scaffold_fn=from_first,
            training_hooks=[_Called(lines)],
        )

    def from_first():
        path = tf.train.latest_checkpoint(str(tmp_path / "first"))
        # Fine-tuning, as BERT does it: by variables' names.
        names = {v.op.name: v for v in tf1.trainable_variables()}
        assert sorted(names) == ["dense/bias", "dense/kernel"]
        tf1.train.init_from_checkpoint(path, {n: n for n in names})
        return tf1.train.Scaffold()

    first = linear.make(tmp_path / "first")
    first.train(linear.input_fn, steps=3)
    tuned = linear.make(
        tmp_path / "tuned", fn=with_calls, params={"learning_rate": 0}
    )
    tuned.train(linear.input_fn, steps=2, hooks=[_Called(lines)])
    weights = linear.weights(first, "dense/")
    np.testing.assert_array_equal(linear.weights(tuned, "dense/"), weights)
    assert len(seen) == 2 and len(lines) == 4
    squares = (linear.X @ weights[:3] + weights[3] - linear.Y) ** 2
    parts = [np.mean(squares[i : i + 4]) for i in (0, 4)]
    np.testing.assert_allclose(seen[0][0], parts, rtol=1e-5)
    [events] = os.listdir(tmp_path / "host")
    written = [
        tf.make_ndarray(value.tensor)
        for event in tf1.train.summary_iterator(str(tmp_path / "host" / events))
        for value in event.summary.value
    ]
    np.testing.assert_array_equal(written, [losses for losses, _ in seen])


def test_hooks_and_limits(tmp_path):
    """Hooks of a call and of an EstimatorSpec; checkpoints in between."""
    lines = []

    def fn(features, labels, mode, params):
        spec = linear.model_fn(features, labels, mode, params)
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

    config = {
        "save_checkpoints_steps": 2,
        "keep_checkpoint_max": 2,
        "save_summary_steps": 0,
        "log_step_count_steps": 0,
    }
    estimator = linear.make(tmp_path, fn=fn, config=config)
    # Until the input ends.
    estimator.train(lambda params: linear.input_fn(params).take(7))
    kept = tf.train.get_checkpoint_state(str(tmp_path))
    steps = [path[-1] for path in kept.all_model_checkpoint_paths]
    assert steps == ["6", "7"]
    assert not [one for one in os.listdir(tmp_path) if "events" in one]
    estimator.train(linear.input_fn, hooks=stop())
    assert estimator.get_variable_value("global_step") == 9
    weights = linear.weights(estimator, "dense/")
    errors = (linear.X @ weights[:3] + weights[3] - linear.Y)[:16]
    found = estimator.evaluate(linear.once, hooks=stop())
    np.testing.assert_allclose(found["loss"], np.mean(errors**2), rtol=1e-5)
    assert len(list(estimator.predict(linear.once, hooks=stop()))) == 16
    assert lines == ["train", "chief"] * 9 + ["eval"] * 2 + ["infer"] * 2


class _Listening(tf1.train.CheckpointSaverListener):
    """Notes all calls, with the newest checkpoint; may stop the training."""

    def __init__(self, directory, stops_at=None):
        self.directory, self.stops_at, self.lines = directory, stops_at, []

    def begin(self):
        tf.constant(1, name="a_listener_may_build")
        self.lines.append("begin")

    def _note(self, name, session, step):
        assert session.run(tf1.train.get_global_step()) == step
        newest = tf.train.latest_checkpoint(str(self.directory)) or "none"
        self.lines.append((name, int(step), newest.split("ckpt-")[-1]))

    def before_save(self, session, global_step_value):
        self._note("before", session, global_step_value)

    def after_save(self, session, global_step_value):
        self._note("after", session, global_step_value)
        return global_step_value == self.stops_at

    def end(self, session, global_step_value):
        self._note("end", session, global_step_value)


def test_saving_listeners(tmp_path):
    """Called around each save, in order; one of them stops the training."""
    first, second = _Listening(tmp_path, stops_at=4), _Listening(tmp_path)
    estimator = linear.make(tmp_path, config={"save_checkpoints_steps": 2})
    estimator.train(
        linear.input_fn, max_steps=3, saving_listeners=[first, second]
    )
    assert first.lines == second.lines
    assert first.lines == [
        "begin",
        ("before", 0, "none"),
        ("after", 0, "0"),
        ("before", 2, "0"),
        ("after", 2, "2"),
        ("before", 3, "2"),
        ("after", 3, "3"),
        ("end", 3, "3"),
    ]
    stopping = _Listening(tmp_path, stops_at=5)
    estimator.train(
        linear.input_fn, steps=9, saving_listeners=(stopping, second)
    )
    assert estimator.get_variable_value("global_step") == 5
    assert stopping.lines[-3:] == second.lines[-3:]
    assert stopping.lines[-2:] == [("after", 5, "5"), ("end", 5, "5")]
    with pytest.raises(TypeError, match="Pass other hooks in `hooks`"):
        estimator.train(linear.input_fn, saving_listeners=[_Called([])])
    assert estimator.get_variable_value("global_step") == 5


def test_all_checkpoints_are_kept_and_used(tmp_path):
    # Without shards: CrossShardOptimizer has nothing to reduce.
    config = {"save_checkpoints_steps": 1, "keep_checkpoint_max": 0}
    estimator = linear.make(tmp_path, use_tpu=False, config=config)
    estimator.train(linear.input_fn, steps=7)
    assert len(list(tmp_path.glob("*.index"))) == 8
    np.testing.assert_allclose(
        linear.weights(estimator, "dense/"), linear.adam(7), rtol=3e-5
    )
    first = tmp_path / "model.ckpt-0"
    rows = list(estimator.predict(linear.once, checkpoint_path=first))
    assert len(rows) == 32 and not any(row["y"] for row in rows)


def test_scaffolds_savers_and_params(tmp_path):
    """A Scaffold's own initialization, a Saver of one's own, mutable params."""

    def fn(features, labels, mode, params):
        params["list"].append(1)
        assert len(params["list"]) == 1
        return linear.model_fn(features, labels, mode, params)._replace(
            scaffold_fn=scaffold
        )

    def scaffold():
        saver = tf1.train.Saver(max_to_keep=None)
        tf1.add_to_collection(tf1.GraphKeys.SAVERS, saver)
        return tf1.train.Scaffold(
            local_init_op=tf1.local_variables_initializer()
        )

    params = {"list": [], "learning_rate": 0.1}
    config = {"save_checkpoints_steps": 1}
    estimator = linear.make(tmp_path, fn=fn, params=params, config=config)
    estimator.train(linear.input_fn, steps=6)
    assert params["list"] == [] and estimator.params["list"] == []
    # That Saver deletes none.
    assert len(list(tmp_path.glob("*.index"))) == 7


def test_a_loss_that_is_nan_is_not_saved(tmp_path):
    def fn(features, labels, mode, params):
        spec = linear.model_fn(features, labels, mode, params)
        step = tf.cast(tf1.train.get_global_step(), tf.float32)
        # 0 / 0 in the second step.
        return spec._replace(loss=spec.loss * (1 - step) / (1 - step))

    config = {"save_checkpoints_steps": 1}
    estimator = linear.make(tmp_path, fn=fn, config=config)
    with pytest.raises(tf1.train.NanLossDuringTrainingError):
        estimator.train(linear.input_fn, steps=3)
    assert estimator.latest_checkpoint().endswith("ckpt-1")
