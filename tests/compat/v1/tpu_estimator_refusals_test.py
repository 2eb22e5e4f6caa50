"""What a TPUEstimator refuses, and with what it ends."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.compat.v1 import graphs
from tests.support import linear_estimator as linear
from tf_xshard.compat import v1

tf1 = tf.compat.v1


def test_shards_that_combine_nothing(tmp_path):
    """Only shard 0 would train."""

    def fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(linear.predicted(features) - labels))
        train_op = graphs.descent().minimize(loss, tf1.train.get_global_step())
        return v1.TPUEstimatorSpec(mode, loss=loss, train_op=train_op)

    with pytest.raises(ValueError, match="combines no gradients"):
        linear.make(tmp_path, 2, fn).train(linear.input_fn, steps=1)
    linear.make(tmp_path, 1, fn).train(linear.input_fn, steps=1)


@pytest.mark.parametrize(
    "data, error, message",
    [
        (lambda: None, ValueError, "gives None"),
        (lambda: {"x": np.ones([])}, ValueError, r"shape \(\)"),
        (lambda: {"x": linear.X[:7]}, ValueError, "drop_remainder"),
        (lambda: tf.sparse.from_dense(np.eye(4)), TypeError, "Make it dense"),
        (lambda: [linear.X] * 3, ValueError, "got 3 values"),
        (linear.input_fn, ValueError, "no argument `labels`"),
    ],
)
def test_input_that_does_not_fit(data, error, message, tmp_path):
    with pytest.raises(error, match=message):
        linear.make(tmp_path, fn=lambda features: None).train(data, steps=1)


def test_refused_arguments(tmp_path):
    make = functools.partial(linear.make, tmp_path)
    plain = functools.partial(v1.TPUEstimator, linear.model_fn)
    per_shard = v1.InputPipelineConfig.PER_SHARD_V1
    other_names = lambda features, images: None
    for call, name, value, message in (
        (v1.RunConfig, "master", "grpc://tpu", "names a TPU"),
        (v1.RunConfig, "save_checkpoints_secs", 60, "Use save_checkpoints_s"),
        (v1.RunConfig, "x", 1, "unexpected keyword argument 'x'"),
        (v1.RunConfig, "tpu_config", 8, "must be a tf_xshard.*TPUConfig"),
        (v1.RunConfig, "save_summary_steps", -1, "must not be negative"),
        (v1.RunConfig, "keep_checkpoint_max", 1.5, "must be an int"),
        (v1.TPUConfig, "num_shards", "8", "must be an int"),
        (v1.TPUConfig, "per_host_input_for_training", per_shard, "called once"),
        (plain, "config", {}, "must be a tf_xshard.*RunConfig"),
        (plain, "model_dir", None, "model_dir"),
        (make, "num_shards", 3, "divided by the 3 shards"),
        (make, "params", {"batch_size": 1}, "batch_size"),
        (make, "warm_start_from", "here", "init_from_checkpoint"),
        (make, "fn", other_names, r"\['images'\]"),
        (make, "fn", "model", "must be a function"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call(**{name: value})
    with pytest.raises(TypeError, match="host_call must be a pair"):
        v1.TPUEstimatorSpec("train", host_call=len).as_estimator_spec()
    # Arguments without an effect.
    assert v1.RunConfig(None, master="").tpu_config == v1.TPUConfig()
    make(eval_on_tpu=True, export_to_tpu=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    return linear.make(directory).train(linear.input_fn, steps=1)


def test_refused_calls(trained, tmp_path):
    estimator = linear.make(tmp_path)
    without = linear.make(tmp_path, train_batch_size=None)
    assert estimator.latest_checkpoint() is None
    empty = lambda params: linear.once(params).take(0)

    def predict(estimator, *args, **kwargs):
        next(estimator.predict(*args, **kwargs))

    train, evaluate = v1.TPUEstimator.train, v1.TPUEstimator.evaluate
    data, once = linear.input_fn, linear.once
    for call, one, given, arguments, message in (
        (train, estimator, data, {"steps": 1, "max_steps": 2}, "not both"),
        (train, estimator, data, {"steps": 0}, "steps must be a positive int"),
        (train, without, data, {"steps": 1}, "train_batch_size"),
        (evaluate, estimator, once, {}, "no checkpoint"),
        (predict, estimator, once, {}, "no checkpoint"),
        (evaluate, trained, once, {"steps": 0}, "steps must be a positive int"),
        (evaluate, trained, empty, {}, "no batch"),
        (predict, trained, once, {"predict_keys": ["z"]}, "predict_keys has"),
    ):
        with pytest.raises(ValueError, match=message):
            call(one, given, **arguments)
    with pytest.raises(ValueError, match="no checkpoint"):
        estimator.get_variable_names()


def _spec(**fields):
    return lambda features, labels, mode: v1.TPUEstimatorSpec(mode, **fields)


def _metrics(metrics):
    return _spec(loss=1.0, eval_metrics=(lambda: metrics, []))


def _uneven(features, mode):
    x = features["x"]
    return v1.TPUEstimatorSpec(mode, {"a": x, "b": x[:1]})


@pytest.mark.parametrize(
    "mode, fn, error, message",
    [
        ("train", lambda x, labels: 3.0, TypeError, "return a TPUEstimatorS"),
        ("eval", _spec(loss=1.0, eval_metrics=len), TypeError, "s must be a p"),
        ("train", _spec(train_op="step"), ValueError, "no loss"),
        ("train", _spec(loss=1.0), ValueError, "no train_op"),
        ("eval", _spec(), ValueError, "no loss"),
        ("eval", _spec(loss=[1.0] * 8), ValueError, "must be one number"),
        ("eval", _metrics({"loss": (1, 2)}), ValueError, "another name"),
        ("eval", _metrics({"global_step": (1, 2)}), ValueError, "another name"),
        ("eval", _metrics({"mae": 3.0}), TypeError, "'mae' must be a"),
        ("eval", _metrics([(1, 2)]), TypeError, "must be a dict"),
        ("infer", _spec(predictions={}), TypeError, "dict of tensors"),
        ("infer", _spec(predictions={"a": {}}), TypeError, "dict of tensors"),
        ("infer", _uneven, ValueError, "different numbers of rows"),
    ],
)
def test_a_bad_spec(mode, fn, error, message, trained):
    estimator = linear.make(trained.model_dir, fn=fn)
    with pytest.raises(error, match=message):
        if mode == "train":
            estimator.train(linear.input_fn, steps=1)
        elif mode == "eval":
            estimator.evaluate(linear.once)
        else:
            next(estimator.predict(linear.once))
