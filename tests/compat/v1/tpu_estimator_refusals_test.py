"""What a TPUEstimator refuses, and with what it ends."""

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


@pytest.mark.parametrize(
    "kind, name, value, error, message",
    [
        ("RunConfig", "master", "grpc://tpu", ValueError, "names a TPU"),
        ("RunConfig", "save_checkpoints_secs", 60, ValueError, "Use save_ch"),
        ("RunConfig", "x", 1, TypeError, "unexpected keyword argument 'x'"),
        ("RunConfig", "tpu_config", 8, TypeError, "must be a tf_xshard.*TPUC"),
        ("RunConfig", "save_summary_steps", -1, ValueError, "be negative"),
        ("RunConfig", "keep_checkpoint_max", 1.5, TypeError, "must be an int"),
        ("TPUConfig", "num_shards", "8", TypeError, "must be an int"),
    ],
)
def test_a_bad_config(kind, name, value, error, message):
    with pytest.raises(error, match=message):
        getattr(v1, kind)(**{name: value})


def test_refused_arguments(tmp_path):
    assert v1.RunConfig(None, master="").tpu_config == v1.TPUConfig()
    per_shard = v1.InputPipelineConfig.PER_SHARD_V1
    with pytest.raises(ValueError, match="called once"):
        v1.TPUConfig(per_host_input_for_training=per_shard)
    for field, mode in (("eval_metrics", "eval"), ("host_call", "train")):
        spec = v1.TPUEstimatorSpec(mode, **{field: len})
        with pytest.raises(TypeError, match=f"{field} must be a pair"):
            spec.as_estimator_spec()
    with pytest.raises(TypeError, match="must be a tf_xshard.*RunConfig"):
        v1.TPUEstimator(linear.model_fn, str(tmp_path), config={})
    with pytest.raises(ValueError, match="model_dir"):
        v1.TPUEstimator(linear.model_fn)
    linear.make(tmp_path, eval_on_tpu=True, export_to_tpu=False)
    for arguments, error, message in (
        ({"num_shards": 3}, ValueError, "divided by the 3 shards"),
        ({"params": {"batch_size": 1}}, ValueError, "batch_size"),
        ({"warm_start_from": "here"}, ValueError, "init_from_checkpoint"),
        ({"fn": lambda features, images: None}, TypeError, r"\['images'\]"),
        ({"fn": "model"}, TypeError, "must be a function"),
    ):
        with pytest.raises(error, match=message):
            linear.make(tmp_path, **arguments)


def test_calls_before_training(tmp_path):
    estimator = linear.make(tmp_path)
    for arguments, message in (
        ({"steps": 1, "max_steps": 2}, "not both"),
        ({"steps": 0}, "steps must be a positive int"),
    ):
        with pytest.raises(ValueError, match=message):
            estimator.train(linear.input_fn, **arguments)
    without = linear.make(tmp_path, train_batch_size=None)
    with pytest.raises(ValueError, match="train_batch_size"):
        without.train(linear.input_fn, steps=1)
    assert estimator.latest_checkpoint() is None
    for call in (
        lambda: estimator.evaluate(linear.once),
        lambda: next(estimator.predict(linear.once)),
        estimator.get_variable_names,
    ):
        with pytest.raises(ValueError, match="no checkpoint"):
            call()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    return linear.make(directory).train(linear.input_fn, steps=1)


def test_calls_of_a_trained_estimator(trained):
    with pytest.raises(ValueError, match="steps must be a positive int"):
        trained.evaluate(linear.once, steps=0)
    with pytest.raises(ValueError, match="no batch"):
        trained.evaluate(lambda params: linear.once(params).take(0))
    with pytest.raises(ValueError, match="predict_keys has"):
        next(trained.predict(linear.once, predict_keys=["z"]))


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
