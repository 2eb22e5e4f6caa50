"""What a TPUEstimator refuses, and with what it ends."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support import linear_estimator as linear
from tf_xshard.compat import v1

tf1 = tf.compat.v1


def test_shards_that_combine_nothing(tmp_path):
    """Only shard 0 would train."""

    def fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(linear.predicted(features) - labels))
        optimizer = tf1.train.GradientDescentOptimizer(0.1)
        train_op = optimizer.minimize(loss, tf1.train.get_global_step())
        return v1.TPUEstimatorSpec(mode, loss=loss, train_op=train_op)

    with pytest.raises(ValueError, match="combines nothing"):
        linear.make(tmp_path, 2, fn).train(linear.input_fn, steps=1)
    linear.make(tmp_path, 1, fn).train(linear.input_fn, steps=1)


@pytest.mark.parametrize(
    "data, error, message",
    [
        (lambda: None, ValueError, "gives None"),
        (lambda: {"x": tf.constant(1.0)}, ValueError, r"shape \(\)"),
        (
            lambda: {"x": tf.constant(linear.X[:7])},
            ValueError,
            "drop_remainder",
        ),
        (
            lambda: {"x": tf.sparse.from_dense(np.eye(4))},
            TypeError,
            "Make it dense",
        ),
    ],
)
def test_input_that_cannot_be_split(data, error, message, tmp_path):
    with pytest.raises(error, match=message):
        linear.make(tmp_path, 2, lambda features: None).train(data, steps=1)


@pytest.mark.parametrize("kind", ["list", "nested", "empty"])
def test_predictions_of_other_structures(kind, tmp_path):
    linear.make(tmp_path).train(linear.input_fn, steps=1)

    def fn(features, mode):
        x = features["x"]
        predictions = {"list": [x, x], "nested": {"a": {"b": x}}, "empty": {}}
        return v1.TPUEstimatorSpec(mode, predictions[kind])

    with pytest.raises(TypeError, match="a tensor, or a dict of tensors"):
        next(linear.make(tmp_path, fn=fn).predict(linear.once))


def test_refusals(tmp_path):
    estimator = linear.make(tmp_path)
    with pytest.raises(ValueError, match="no checkpoint"):
        estimator.evaluate(linear.once)
    with pytest.raises(ValueError, match="no checkpoint"):
        next(estimator.predict(linear.once))
    assert estimator.latest_checkpoint() is None
    with pytest.raises(ValueError, match="no checkpoint"):
        estimator.get_variable_names()
    with pytest.raises(ValueError, match="no checkpoint"):
        estimator.get_variable_value("global_step")
    with pytest.raises(ValueError, match="not both"):
        estimator.train(linear.input_fn, steps=1, max_steps=2)
    with pytest.raises(ValueError, match="train_batch_size"):
        linear.make(tmp_path, train_batch_size=None).train(
            linear.input_fn, steps=1
        )
    with pytest.raises(ValueError, match="divided by the 3 shards"):
        linear.make(tmp_path, 3)
    with pytest.raises(ValueError, match="batch_size"):
        linear.make(tmp_path, params={"batch_size": 1})
    with pytest.raises(ValueError, match="model_dir"):
        v1.TPUEstimator(linear.model_fn)
    with pytest.raises(TypeError, match=r"\['images'\]"):
        linear.make(tmp_path, fn=lambda features, images: None)
    with pytest.raises(TypeError, match="must return a TPUEstimatorSpec"):
        linear.make(tmp_path, fn=lambda features, labels: 3.0).train(
            linear.input_fn, steps=1
        )
    with pytest.raises(ValueError, match="no train_op"):
        linear.make(
            tmp_path,
            fn=lambda features, labels, mode: v1.TPUEstimatorSpec(
                mode, loss=tf.constant(1.0)
            ),
        ).train(linear.input_fn, steps=1)
    with pytest.raises(ValueError, match="no loss"):
        linear.make(
            tmp_path,
            fn=lambda features, labels, mode: v1.TPUEstimatorSpec(
                mode, train_op=tf.no_op()
            ),
        ).train(linear.input_fn, steps=1)
    with pytest.raises(ValueError, match="no argument `labels`"):
        linear.make(tmp_path, fn=lambda features: None).train(
            linear.input_fn, steps=1
        )
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
    for name in ("save_summary_steps", "keep_checkpoint_max", "tf_random_seed"):
        with pytest.raises(TypeError, match=f"{name} must be an int"):
            v1.RunConfig(**{name: 1.5})
    with pytest.raises(ValueError, match="num_shards must be positive"):
        v1.TPUConfig(num_shards=0)
    with pytest.raises(TypeError, match="num_shards must be an int"):
        v1.TPUConfig(num_shards="8")
    assert v1.RunConfig(None, master="").tpu_config == v1.TPUConfig()
    with pytest.raises(TypeError, match="must be a tf_xshard.*RunConfig"):
        v1.TPUEstimator(linear.model_fn, str(tmp_path), config={})
    with pytest.raises(ValueError, match="init_from_checkpoint"):
        linear.make(tmp_path, warm_start_from="somewhere")
    linear.make(tmp_path, eval_on_tpu=True, export_to_tpu=False)
    with pytest.raises(TypeError, match="must be a function"):
        linear.make(tmp_path, fn="model")
    with pytest.raises(ValueError, match="got 3 values"):
        estimator.train(lambda: (linear.X, linear.Y, linear.Y), steps=1)
    with pytest.raises(ValueError, match="steps must be a positive int"):
        estimator.train(linear.input_fn, steps=0)
    with pytest.raises(ValueError, match="called once"):
        v1.TPUConfig(
            per_host_input_for_training=v1.InputPipelineConfig.PER_SHARD_V1
        )
    with pytest.raises(TypeError, match="eval_metrics must be a pair"):
        v1.TPUEstimatorSpec("eval", eval_metrics=len).as_estimator_spec()
    with pytest.raises(TypeError, match="host_call must be a pair"):
        v1.TPUEstimatorSpec("train", host_call=len).as_estimator_spec()
    estimator.train(linear.input_fn, steps=1)
    with pytest.raises(ValueError, match="steps must be a positive int"):
        estimator.evaluate(linear.once, steps=0)
    with pytest.raises(ValueError, match="no loss"):
        linear.make(
            tmp_path,
            fn=lambda features, labels, mode: v1.TPUEstimatorSpec(mode),
        ).evaluate(linear.once)
    with pytest.raises(TypeError, match="must return a TPUEstimatorSpec"):
        next(
            linear.make(tmp_path, fn=lambda features: 3.0).predict(linear.once)
        )
    with pytest.raises(ValueError, match="predict_keys has"):
        next(estimator.predict(linear.once, predict_keys=["z"]))
    for metric, error, message in (
        ({"loss": (1, 2)}, ValueError, "another name"),
        ({"global_step": (1, 2)}, ValueError, "another name"),
        ({"mae": 3.0}, TypeError, "'mae' must be a"),
        ([(1, 2)], TypeError, "must be a dict"),
    ):
        with pytest.raises(error, match=message):
            linear.make(
                tmp_path,
                fn=lambda features, labels, mode, metric=metric: (
                    v1.TPUEstimatorSpec(
                        mode,
                        loss=tf.constant(1.0),
                        eval_metrics=(lambda: metric, []),
                    )
                ),
            ).evaluate(linear.once)
    uneven = linear.make(
        tmp_path,
        fn=lambda features, mode: v1.TPUEstimatorSpec(
            mode, {"a": features["x"], "b": features["x"][:1]}
        ),
    )
    with pytest.raises(ValueError, match="different numbers of rows"):
        next(uneven.predict(linear.once))
    vector = linear.make(
        tmp_path,
        fn=lambda features, labels, mode: v1.TPUEstimatorSpec(
            mode, loss=labels
        ),
    )
    with pytest.raises(ValueError, match="must be one number"):
        vector.evaluate(linear.once)
    with pytest.raises(ValueError, match="no batch"):
        estimator.evaluate(lambda params: linear.once(params).take(0))
