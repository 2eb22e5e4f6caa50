"""What a TPUEstimator runs around its steps: hooks, host calls, Savers."""

import os

import numpy as np
import pytest
import tensorflow as tf

from tests.support import linear_estimator as linear
from tests.support import versions
from tf_xshard.compat import v1

tf1 = tf.compat.v1


@pytest.mark.parametrize("num_shards", [1, 2])
def test_calls_on_the_host(num_shards, tmp_path):
    """host_call, scaffold_fn, hooks and summaries, as TPU scripts have them."""
    seen, lines = [], []

    class Hook(tf1.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            lines.append("step")

    def on_host(losses, step):
        assert losses.shape == [num_shards] and step.shape == [num_shards]
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
            scaffold_fn=lambda: _from(tmp_path / "first"),
            training_hooks=[Hook()],
        )

    def _from(directory):
        path = tf.train.latest_checkpoint(str(directory))
        # Fine-tuning, as BERT does it: by variables' names.
        names = {v.op.name: v for v in tf1.trainable_variables()}
        assert sorted(names) == ["dense/bias", "dense/kernel"]
        tf1.train.init_from_checkpoint(path, {n: n for n in names})
        return tf1.train.Scaffold()

    first = linear.make(tmp_path / "first", num_shards)
    first.train(linear.input_fn, steps=3)
    tuned = linear.make(
        tmp_path / "tuned", num_shards, with_calls, params={"learning_rate": 0}
    )
    tuned.train(linear.input_fn, steps=2, hooks=[Hook()])
    np.testing.assert_array_equal(
        tuned.get_variable_value("dense/kernel"),
        first.get_variable_value("dense/kernel"),
    )
    assert len(seen) == 2 and len(lines) == 4
    if num_shards == 2:
        whole = first.get_variable_value("dense/kernel")
        bias = first.get_variable_value("dense/bias")
        parts = [
            np.mean(
                (linear.X[i : i + 4] @ whole + bias - linear.Y[i : i + 4]) ** 2
            )
            for i in (0, 4)
        ]
        np.testing.assert_allclose(seen[0][0], parts, rtol=1e-5)
    [events] = os.listdir(tmp_path / "host")
    written = [
        tf.make_ndarray(value.tensor)
        for event in tf1.train.summary_iterator(str(tmp_path / "host" / events))
        for value in event.summary.value
    ]
    np.testing.assert_array_equal(written, [losses for losses, _ in seen])


@pytest.mark.parametrize("kind", ["operation", "tensor", "list", "none"])
def test_what_steps_and_host_calls_return(kind, tmp_path):
    """A train_op may be a tensor, and a host_call returns what it likes."""
    losses = []

    class Hook(tf1.train.SessionRunHook):
        def before_run(self, run_context):
            return tf1.train.SessionRunArgs("loss_on_host:0")

        def after_run(self, run_context, run_values):
            losses.append(run_values.results)

    def on_host(loss):
        loss = tf.identity(loss, "loss_on_host")
        results = {
            "operation": loss.op,
            "tensor": loss,
            "list": [loss, [loss.op]],
            "none": None,
        }
        return results[kind]

    def fn(features, labels, mode, params):
        spec = linear.model_fn(features, labels, mode, params)
        with tf.control_dependencies([spec.train_op]):
            seven = tf.constant(7.0) * 1
        spec = spec._replace(
            train_op=seven, host_call=(on_host, [tf.reshape(spec.loss, [1])])
        )
        assert spec.as_estimator_spec().train_op.type == "NoOp"
        return spec

    estimator = linear.make(tmp_path, 1, fn)
    estimator.train(linear.input_fn, steps=4, hooks=[Hook()])
    np.testing.assert_allclose(
        linear.weights(estimator, "dense/"), linear.adam(4), rtol=3e-5
    )
    np.testing.assert_allclose(
        losses[0], [np.mean(linear.Y[:8] ** 2)], rtol=1e-5
    )


def test_hooks_and_limits(tmp_path):
    """Hooks that stop, checkpoints in between, and how many are kept."""

    class Stop(tf1.train.SessionRunHook):
        def begin(self):
            self.count = 0

        def after_run(self, run_context, run_values):
            self.count += 1
            if self.count == 2:
                run_context.request_stop()

    config = v1.RunConfig(
        v1.TPUConfig(num_shards=np.int64(2)),
        model_dir=str(tmp_path),
        save_checkpoints_steps=2,
        keep_checkpoint_max=2,
        save_summary_steps=0,
        log_step_count_steps=0,
    )
    estimator = v1.TPUEstimator(
        linear.model_fn,
        config=config,
        params={"learning_rate": 0.1},
        train_batch_size=8,
        eval_batch_size=8,
        predict_batch_size=8,
    )
    estimator.train(linear.input_fn, steps=7)
    kept = tf.train.get_checkpoint_state(str(tmp_path))
    steps = [path[-1] for path in kept.all_model_checkpoint_paths]
    assert steps == ["6", "7"]
    assert not [one for one in os.listdir(tmp_path) if "events" in one]
    estimator.train(linear.input_fn, hooks=[Stop()])
    assert estimator.get_variable_value("global_step") == 9
    weights = linear.weights(estimator, "dense/")
    errors = (linear.X @ weights[:3] + weights[3] - linear.Y)[:16]
    found = estimator.evaluate(linear.once, hooks=[Stop()])
    np.testing.assert_allclose(found["loss"], np.mean(errors**2), rtol=1e-5)
    assert len(list(estimator.predict(linear.once, hooks=[Stop()]))) == 16
    # Without shards: CrossShardOptimizer has nothing to reduce.
    alone = linear.make(tmp_path / "alone", 4, use_tpu=False)
    alone.train(linear.input_fn, steps=4)
    np.testing.assert_allclose(
        linear.weights(alone, "dense/"), linear.adam(4), rtol=3e-5
    )


def test_hooks_of_a_spec_and_earlier_checkpoints(tmp_path):
    """In every mode; training until the input ends, and all saves kept."""
    runs = []

    class Noted(tf1.train.SessionRunHook):
        def __init__(self, name):
            self.name = name

        def after_run(self, run_context, run_values):
            runs.append(self.name)

    def fn(features, labels, mode, params):
        return linear.model_fn(features, labels, mode, params)._replace(
            training_hooks=[Noted("train")],
            evaluation_hooks=[Noted("eval")],
            prediction_hooks=[Noted("infer")],
        )

    estimator = v1.TPUEstimator(
        fn,
        str(tmp_path),
        v1.RunConfig(
            v1.TPUConfig(num_shards=2),
            save_checkpoints_steps=1,
            keep_checkpoint_max=0,
        ),
        {"learning_rate": 0.1},
        train_batch_size=8,
        eval_batch_size=16,
        predict_batch_size=32,
    )
    estimator.train(lambda params: linear.input_fn(params).take(7))
    assert estimator.get_variable_value("global_step") == 7
    assert len(list(tmp_path.glob("*.index"))) == 8
    estimator.evaluate(linear.once)
    early, late = (
        np.array([row["y"] for row in estimator.predict(linear.once, **path)])
        for path in ({"checkpoint_path": tmp_path / "model.ckpt-0"}, {})
    )
    assert runs == ["train"] * 7 + ["eval"] * 2 + ["infer"] * 2
    np.testing.assert_array_equal(early, np.zeros([32, 1]))
    weights = linear.adam(7)
    np.testing.assert_allclose(
        late, linear.X @ weights[:3] + weights[3], rtol=1e-4, atol=1e-5
    )


@versions.writes_graphs
def test_scaffolds_savers_and_params(tmp_path):
    """A Scaffold's own initialization, a Saver of one's own, mutable params."""

    def fn(features, labels, mode, params):
        params["list"].append(1)
        assert len(params["list"]) == 1
        if mode == v1.ModeKeys.TRAIN:
            tf1.train.get_or_create_global_step()
        spec = linear.model_fn(features, labels, mode, params)
        if mode != v1.ModeKeys.TRAIN or tf1.get_collection("savers"):
            return spec
        return spec._replace(scaffold_fn=scaffold)

    def scaffold():
        saver = tf1.train.Saver(max_to_keep=None)
        tf1.add_to_collection(tf1.GraphKeys.SAVERS, saver)
        return tf1.train.Scaffold(
            local_init_op=tf1.local_variables_initializer()
        )

    params = {"learning_rate": 0.1, "list": []}
    config = v1.RunConfig(
        v1.TPUConfig(num_shards=2), save_checkpoints_steps=1
    ).replace(log_step_count_steps=0)
    estimator = v1.TPUEstimator(
        fn, str(tmp_path), config, params, train_batch_size=8
    )
    estimator.train(linear.input_fn, steps=7)
    assert params["list"] == [] and estimator.params["list"] == []
    # That Saver deletes none.
    assert len(list(tmp_path.glob("*.index"))) == 8
    hook = tf1.train.CheckpointSaverHook(str(tmp_path / "more"), save_steps=1)
    linear.make(tmp_path / "hook").train(linear.input_fn, steps=1, hooks=[hook])
    assert tf.train.latest_checkpoint(str(tmp_path / "more"))


def test_a_loss_that_is_nan_is_not_saved(tmp_path):
    estimator = linear.make(tmp_path)
    estimator.train(linear.input_fn, steps=1)

    def broken(features, labels, mode, params):
        spec = linear.model_fn(features, labels, mode, params)
        return spec._replace(loss=spec.loss * np.nan)

    config = v1.RunConfig(save_checkpoints_steps=1)
    with pytest.raises(tf1.train.NanLossDuringTrainingError):
        v1.TPUEstimator(
            broken,
            str(tmp_path),
            config,
            params={"learning_rate": 0.1},
            train_batch_size=8,
        ).train(linear.input_fn, steps=3)
    assert estimator.latest_checkpoint().endswith("ckpt-1")
