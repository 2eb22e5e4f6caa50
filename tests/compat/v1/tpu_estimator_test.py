"""TPUEstimator's model_fn, driven with no TPU and no Estimator package."""

import importlib
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.support import paths
from tf_xshard.compat import v1

tf1 = tf.compat.v1
RNG = np.random.default_rng(7)
X = RNG.normal(size=(32, 3)).astype("float32")
Y = (X @ np.float32([[1.0], [-2.0], [0.5]]) + 0.25).astype("float32")


def _model(features):
    with tf1.variable_scope("dense"):
        kernel = tf1.get_variable(
            "kernel", [3, 1], initializer=tf1.zeros_initializer()
        )
        bias = tf1.get_variable(
            "bias", [1], initializer=tf1.zeros_initializer()
        )
    return features["x"] @ kernel + bias


def model_fn(features, labels, mode, params):
    """In the manner of a TPU's model_fn: metrics and host_call on the host."""
    y = _model(features)
    if mode == v1.ModeKeys.PREDICT:
        return v1.TPUEstimatorSpec(
            mode, predictions={"y": y, "first": features["x"][:, 0]}
        )
    if mode == v1.ModeKeys.TRAIN:
        assert labels.shape[0] == params["batch_size"]
    loss = tf.reduce_mean(tf.square(y - labels))
    if mode == v1.ModeKeys.EVAL:
        return v1.TPUEstimatorSpec(
            mode,
            loss=loss,
            eval_metrics=(
                lambda labels, y: {
                    "mae": tf1.metrics.mean_absolute_error(labels, y)
                },
                {"labels": labels, "y": y},
            ),
        )
    optimizer = v1.CrossShardOptimizer(
        tf1.train.AdamOptimizer(params["learning_rate"])
    )
    step = tf1.train.get_global_step()
    return v1.TPUEstimatorSpec(
        mode, loss=loss, train_op=optimizer.minimize(loss, step)
    )


def input_fn(params):
    """Batches of the global size, over and over."""
    data = tf.data.Dataset.from_tensor_slices(({"x": X}, Y)).repeat()
    return data.batch(params["batch_size"], drop_remainder=True)


def once(params):
    """The same data once; the last batch is smaller if it has to be."""
    data = tf.data.Dataset.from_tensor_slices(({"x": X}, Y))
    return data.batch(params["batch_size"], drop_remainder=False)


def _weights(estimator, scope=""):
    """The kernel and, below it, the bias."""
    value = estimator.get_variable_value
    return np.concatenate(
        [value(f"{scope}kernel"), value(f"{scope}bias").reshape(1, 1)]
    )


def _estimator(directory, num_shards=2, fn=model_fn, **kwargs):
    kwargs = {
        "train_batch_size": 8,
        "eval_batch_size": 8,
        "predict_batch_size": 8,
        "params": {"learning_rate": 0.1},
        **kwargs,
    }
    config = v1.RunConfig(tpu_config=v1.TPUConfig(num_shards=num_shards))
    return v1.TPUEstimator(fn, str(directory), config=config, **kwargs)


def _adam(num_steps):
    """The kernel and the bias after some steps on the global batches."""
    weights = np.zeros([4, 1])
    m, v = np.zeros([4, 1]), np.zeros([4, 1])
    rows = np.concatenate([X, np.ones([32, 1])], axis=1).astype(np.float64)
    for step in range(num_steps):
        part = np.arange(8 * step, 8 * step + 8) % 32
        x, y = rows[part], Y[part]
        gradient = 2 * x.T @ (x @ weights - y) / 8
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient**2
        rate = 0.1 * np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
        weights -= rate * m / (np.sqrt(v) + 1e-8)
    return weights


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_shards_train_as_one_device(num_shards, tmp_path):
    estimator = _estimator(tmp_path, num_shards)
    assert estimator.train(input_fn, max_steps=6) is estimator
    # It goes on from the checkpoint, by a number of steps or up to one.
    estimator.train(input_fn, steps=2).train(input_fn, max_steps=10)
    estimator.train(input_fn, max_steps=10)
    assert estimator.latest_checkpoint().endswith("ckpt-10")
    assert estimator.get_variable_value("global_step") == 10
    assert "dense/kernel/Adam" in estimator.get_variable_names()
    weights = _weights(estimator, "dense/")
    fresh = _estimator(tmp_path / "fresh", num_shards)
    fresh.train(input_fn, steps=4)
    np.testing.assert_allclose(_weights(fresh, "dense/"), _adam(4), rtol=3e-5)

    # The metrics are of rows; the loss, as documented, the mean over batches.
    uneven = _estimator(tmp_path, num_shards, eval_batch_size=12)
    y = X @ weights[:3] + weights[3]
    squares = (y - Y) ** 2
    np.testing.assert_allclose(
        uneven.evaluate(once)["loss"],
        np.mean([np.mean(squares[i : i + 12]) for i in (0, 12, 24)]),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        uneven.evaluate(once)["mae"], np.mean(np.abs(y - Y)), rtol=1e-5
    )
    results = estimator.evaluate(once)
    np.testing.assert_allclose(
        results["loss"], np.mean((y - Y) ** 2), rtol=1e-5
    )
    np.testing.assert_allclose(
        results["mae"], np.mean(np.abs(y - Y)), rtol=1e-5
    )
    assert results["global_step"] == 10
    half = estimator.evaluate(once, steps=2, name="half")
    np.testing.assert_allclose(
        half["loss"], np.mean((y - Y)[:16] ** 2), rtol=1e-5
    )
    assert os.listdir(tmp_path / "eval_half")

    rows = list(estimator.predict(once))
    np.testing.assert_allclose([row["y"] for row in rows], y, rtol=1e-4)
    np.testing.assert_array_equal([row["first"] for row in rows], X[:, 0])
    [batch, *_] = estimator.predict(
        once, predict_keys="first", yield_single_examples=False
    )
    assert list(batch) == ["first"] and batch["first"].shape == (8,)
    old = estimator.evaluate(
        once, checkpoint_path=str(tmp_path / "model.ckpt-6")
    )
    assert old["global_step"] == 6 and old["loss"] > results["loss"]


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
        spec = model_fn(features, labels, mode, params)
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

    first = _estimator(tmp_path / "first", num_shards)
    first.train(input_fn, steps=3)
    tuned = _estimator(
        tmp_path / "tuned", num_shards, with_calls, params={"learning_rate": 0}
    )
    tuned.train(input_fn, steps=2, hooks=[Hook()])
    np.testing.assert_array_equal(
        tuned.get_variable_value("dense/kernel"),
        first.get_variable_value("dense/kernel"),
    )
    assert len(seen) == 2 and len(lines) == 4
    if num_shards == 2:
        whole = first.get_variable_value("dense/kernel")
        bias = first.get_variable_value("dense/bias")
        parts = [
            np.mean((X[i : i + 4] @ whole + bias - Y[i : i + 4]) ** 2)
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
        spec = model_fn(features, labels, mode, params)
        with tf.control_dependencies([spec.train_op]):
            seven = tf.constant(7.0) * 1
        spec = spec._replace(
            train_op=seven, host_call=(on_host, [tf.reshape(spec.loss, [1])])
        )
        assert spec.as_estimator_spec().train_op.type == "NoOp"
        return spec

    estimator = _estimator(tmp_path, 1, fn)
    estimator.train(input_fn, steps=4, hooks=[Hook()])
    np.testing.assert_allclose(
        _weights(estimator, "dense/"), _adam(4), rtol=3e-5
    )
    np.testing.assert_allclose(losses[0], [np.mean(Y[:8] ** 2)], rtol=1e-5)


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
        model_fn,
        config=config,
        params={"learning_rate": 0.1},
        train_batch_size=8,
        eval_batch_size=8,
        predict_batch_size=8,
    )
    estimator.train(input_fn, steps=7)
    kept = tf.train.get_checkpoint_state(str(tmp_path))
    steps = [path[-1] for path in kept.all_model_checkpoint_paths]
    assert steps == ["6", "7"]
    assert not [one for one in os.listdir(tmp_path) if "events" in one]
    estimator.train(input_fn, hooks=[Stop()])
    assert estimator.get_variable_value("global_step") == 9
    weights = _weights(estimator, "dense/")
    errors = (X @ weights[:3] + weights[3] - Y)[:16]
    found = estimator.evaluate(once, hooks=[Stop()])
    np.testing.assert_allclose(found["loss"], np.mean(errors**2), rtol=1e-5)
    assert len(list(estimator.predict(once, hooks=[Stop()]))) == 16
    # Without shards: CrossShardOptimizer has nothing to reduce.
    alone = _estimator(tmp_path / "alone", 4, use_tpu=False)
    alone.train(input_fn, steps=4)
    np.testing.assert_allclose(_weights(alone, "dense/"), _adam(4), rtol=3e-5)


def test_an_estimator_spec(tmp_path):
    """It does as well, and `as_estimator_spec` makes one."""

    def plain(features, labels, mode, params):
        spec = model_fn(features, labels, mode, params).as_estimator_spec()
        assert isinstance(spec, v1.EstimatorSpec)
        return spec

    estimator = _estimator(tmp_path, 2, plain)
    estimator.train(input_fn, steps=4)
    np.testing.assert_allclose(
        estimator.get_variable_value("dense/kernel"), _adam(4)[:3], rtol=1e-5
    )
    assert estimator.evaluate(once)["mae"] > 0
    assert len(list(estimator.predict(once))) == 32


def test_features_only(tmp_path):
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

    estimator = _estimator(tmp_path, 2, fn)
    estimator.train(lambda: {"x": tf.constant(X)}, steps=2)
    w = 1 - 2 * 0.5 * np.mean(X**2)
    np.testing.assert_allclose(estimator.get_variable_value("w"), w, rtol=1e-5)
    rows = list(estimator.predict(once))
    np.testing.assert_allclose(rows, w * X, rtol=1e-4)


def test_scaffolds_savers_and_params(tmp_path):
    """A Scaffold's own initialization, a Saver of one's own, mutable params."""

    def fn(features, labels, mode, params):
        params["list"].append(1)
        assert len(params["list"]) == 1
        if mode == v1.ModeKeys.TRAIN:
            tf1.train.get_or_create_global_step()
        spec = model_fn(features, labels, mode, params)
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
    estimator.train(input_fn, steps=7)
    assert params["list"] == [] and estimator.params["list"] == []
    # That Saver deletes none.
    assert len(list(tmp_path.glob("*.index"))) == 8
    hook = tf1.train.CheckpointSaverHook(str(tmp_path / "more"), save_steps=1)
    _estimator(tmp_path / "hook").train(input_fn, steps=1, hooks=[hook])
    assert tf.train.latest_checkpoint(str(tmp_path / "more"))


def test_shards_that_combine_nothing(tmp_path):
    """Only shard 0 would train."""

    def fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(_model(features) - labels))
        optimizer = tf1.train.GradientDescentOptimizer(0.1)
        train_op = optimizer.minimize(loss, tf1.train.get_global_step())
        return v1.TPUEstimatorSpec(mode, loss=loss, train_op=train_op)

    with pytest.raises(ValueError, match="combines nothing"):
        _estimator(tmp_path, 2, fn).train(input_fn, steps=1)
    _estimator(tmp_path, 1, fn).train(input_fn, steps=1)


@pytest.mark.parametrize(
    "data, error, message",
    [
        (lambda: None, ValueError, "gives None"),
        (lambda: {"x": tf.constant(1.0)}, ValueError, r"shape \(\)"),
        (lambda: {"x": tf.constant(X[:7])}, ValueError, "drop_remainder"),
        (
            lambda: {"x": tf.sparse.from_dense(np.eye(4))},
            TypeError,
            "Make it dense",
        ),
    ],
)
def test_input_that_cannot_be_split(data, error, message, tmp_path):
    with pytest.raises(error, match=message):
        _estimator(tmp_path, 2, lambda features: None).train(data, steps=1)


@pytest.mark.parametrize("kind", ["list", "nested", "empty"])
def test_predictions_of_other_structures(kind, tmp_path):
    _estimator(tmp_path).train(input_fn, steps=1)

    def fn(features, mode):
        x = features["x"]
        predictions = {"list": [x, x], "nested": {"a": {"b": x}}, "empty": {}}
        return v1.TPUEstimatorSpec(mode, predictions[kind])

    with pytest.raises(TypeError, match="a tensor, or a dict of tensors"):
        next(_estimator(tmp_path, fn=fn).predict(once))


def test_refusals(tmp_path):
    estimator = _estimator(tmp_path)
    with pytest.raises(ValueError, match="no checkpoint"):
        estimator.evaluate(once)
    with pytest.raises(ValueError, match="no checkpoint"):
        next(estimator.predict(once))
    with pytest.raises(ValueError, match="not both"):
        estimator.train(input_fn, steps=1, max_steps=2)
    with pytest.raises(ValueError, match="train_batch_size"):
        _estimator(tmp_path, train_batch_size=None).train(input_fn, steps=1)
    with pytest.raises(ValueError, match="divided by the 3 shards"):
        _estimator(tmp_path, 3)
    with pytest.raises(ValueError, match="batch_size"):
        _estimator(tmp_path, params={"batch_size": 1})
    with pytest.raises(ValueError, match="model_dir"):
        v1.TPUEstimator(model_fn)
    with pytest.raises(TypeError, match=r"\['images'\]"):
        _estimator(tmp_path, fn=lambda features, images: None)
    with pytest.raises(TypeError, match="must return a TPUEstimatorSpec"):
        _estimator(tmp_path, fn=lambda features, labels: 3.0).train(
            input_fn, steps=1
        )
    with pytest.raises(ValueError, match="no train_op"):
        _estimator(
            tmp_path,
            fn=lambda features, labels, mode: v1.TPUEstimatorSpec(
                mode, loss=tf.constant(1.0)
            ),
        ).train(input_fn, steps=1)
    with pytest.raises(ValueError, match="no argument `labels`"):
        _estimator(tmp_path, fn=lambda features: None).train(input_fn, steps=1)
    for name, value in (("master", "grpc://tpu:8470"), ("cluster", object())):
        with pytest.raises(ValueError, match="names a TPU"):
            v1.RunConfig(**{name: value})
    with pytest.raises(ValueError, match="Use save_checkpoints_steps"):
        v1.RunConfig(save_checkpoints_secs=60)
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
        v1.RunConfig(x=1)
    with pytest.raises(TypeError, match="must be a tf_xshard.*TPUConfig"):
        v1.RunConfig(8)
    with pytest.raises(ValueError, match="must not be negative"):
        v1.RunConfig(save_summary_steps=-1)
    assert v1.RunConfig(None, master="").tpu_config == v1.TPUConfig()
    with pytest.raises(TypeError, match="must be a tf_xshard.*RunConfig"):
        v1.TPUEstimator(model_fn, str(tmp_path), config={})
    with pytest.raises(ValueError, match="init_from_checkpoint"):
        _estimator(tmp_path, warm_start_from="somewhere")
    _estimator(tmp_path, eval_on_tpu=True, export_to_tpu=False)
    with pytest.raises(TypeError, match="must be a function"):
        _estimator(tmp_path, fn="model")
    with pytest.raises(ValueError, match="got 3 values"):
        estimator.train(lambda: (X, Y, Y), steps=1)
    with pytest.raises(ValueError, match="steps must be a positive int"):
        estimator.train(input_fn, steps=0)
    with pytest.raises(ValueError, match="called once"):
        v1.TPUConfig(
            per_host_input_for_training=v1.InputPipelineConfig.PER_SHARD_V1
        )
    with pytest.raises(TypeError, match="eval_metrics must be a pair"):
        v1.TPUEstimatorSpec("eval", eval_metrics=len).as_estimator_spec()
    estimator.train(input_fn, steps=1)
    with pytest.raises(ValueError, match="predict_keys has"):
        next(estimator.predict(once, predict_keys=["z"]))
    for metric, error, message in (
        ({"loss": (1, 2)}, ValueError, "another name"),
        ({"mae": 3.0}, TypeError, "'mae' must be a"),
        ([(1, 2)], TypeError, "must be a dict"),
    ):
        with pytest.raises(error, match=message):
            _estimator(
                tmp_path,
                fn=lambda features, labels, mode, metric=metric: (
                    v1.TPUEstimatorSpec(
                        mode,
                        loss=tf.constant(1.0),
                        eval_metrics=(lambda: metric, []),
                    )
                ),
            ).evaluate(once)
    uneven = _estimator(
        tmp_path,
        fn=lambda features, mode: v1.TPUEstimatorSpec(
            mode, {"a": features["x"], "b": features["x"][:1]}
        ),
    )
    with pytest.raises(ValueError, match="different numbers of rows"):
        next(uneven.predict(once))
    vector = _estimator(
        tmp_path,
        fn=lambda features, labels, mode: v1.TPUEstimatorSpec(
            mode, loss=labels
        ),
    )
    with pytest.raises(ValueError, match="must be one number"):
        vector.evaluate(once)
    with pytest.raises(ValueError, match="no batch"):
        estimator.evaluate(lambda params: once(params).take(0))


def test_a_loss_that_is_nan_is_not_saved(tmp_path):
    estimator = _estimator(tmp_path)
    estimator.train(input_fn, steps=1)

    def broken(features, labels, mode, params):
        spec = model_fn(features, labels, mode, params)
        return spec._replace(loss=spec.loss * np.nan)

    config = v1.RunConfig(save_checkpoints_steps=1)
    with pytest.raises(tf1.train.NanLossDuringTrainingError):
        v1.TPUEstimator(
            broken,
            str(tmp_path),
            config,
            params={"learning_rate": 0.1},
            train_batch_size=8,
        ).train(input_fn, steps=3)
    assert estimator.latest_checkpoint().endswith("ckpt-1")


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
    estimator = _estimator(tmp_path, 4, script["model_fn"])
    estimator.train(input_fn, steps=8)
    assert estimator.get_variable_value("global_step") == 8
    weights, m = np.zeros([4, 1]), np.zeros([4, 1])
    rows = np.concatenate([X, np.ones([32, 1])], axis=1).astype(np.float64)
    for step in range(8):
        gradient = np.zeros([4, 1])
        for shard in range(4):
            part = (8 * step + 2 * shard + np.arange(2)) % 32
            x, y = rows[part], Y[part]
            # Not from compute_gradients, so clipped in each shard and summed.
            one = 2 * x.T @ (x @ weights - y) / 2
            gradient += one / max(1, np.linalg.norm(one))
        rate = 0.2 * step / 3 if step < 3 else 0.2 * (1 - step / 10)
        m = 0.9 * m + 0.1 * gradient
        weights = weights - rate * (
            m + 0.01 * weights * np.float64([[1], [1], [1], [0]])
        )
    np.testing.assert_allclose(_weights(estimator), weights, rtol=1e-4)


# In the manner of tensorflow/tpu's MNIST example: layers, and all modes.
_LAYERS = """
import sys
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
    version = ".".join(tf.__version__.split(".")[:2])
    packages = str(tmp_path / "packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        + ["--target", packages, f"tf_keras=={version}.*"],
        check=True,
        timeout=120,
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
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    accuracy, of_predictions, has_names = run.stdout.split()
    # A float32 mean, and one of float64.
    assert abs(float(accuracy) - float(of_predictions)) < 1e-6
    assert float(accuracy) > 0.8 and has_names == "True"


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
