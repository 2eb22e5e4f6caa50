"""Defines `TPUEstimatorSpec`, and TensorFlow Estimator's specs and modes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf


class ModeKeys:
    """Names the modes in which a model_fn is called.

    Attributes:
      TRAIN: Training.
      EVAL: Evaluation.
      PREDICT: Prediction.

    Example:

    >>> tf_xshard.compat.v1.ModeKeys.TRAIN
    'train'

    Source: tf.estimator.ModeKeys.
    """

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


class EstimatorSpec(NamedTuple):
    """Holds the result of a model_fn.

    Args:
      mode: One of `ModeKeys`.
      predictions: A tensor or a dict of tensors. Default: None.
      loss: A scalar tensor. Default: None.
      train_op: The operation of a training step. Default: None.
      eval_metric_ops: A dict of (value, update operation) pairs. Default: None.
      export_outputs: A dict of `PredictOutput`, `ClassificationOutput` or
        `RegressionOutput`. Default: None.
      training_chief_hooks: Training hooks of the chief. Default: none.
      training_hooks: Training hooks of all workers. Default: none.
      scaffold: A `tf.compat.v1.train.Scaffold`. Default: None.
      evaluation_hooks: Evaluation hooks. Default: none.
      prediction_hooks: Prediction hooks. Default: none.

    Example:

    >>> tf_xshard.compat.v1.EstimatorSpec("train", loss=tf.constant(1.0)).mode
    'train'

    Source: tf.estimator.EstimatorSpec.
    """

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metric_ops: dict[str, tuple[Any, Any]] | None = None
    export_outputs: dict[str, Any] | None = None
    training_chief_hooks: tuple[Any, ...] = ()
    training_hooks: tuple[Any, ...] = ()
    scaffold: Any = None
    evaluation_hooks: tuple[Any, ...] = ()
    prediction_hooks: tuple[Any, ...] = ()


class PredictOutput(NamedTuple):
    """Describes an exported signature with any outputs.

    Args:
      outputs: A tensor or a dict of tensors.

    Example:

    >>> tf_xshard.compat.v1.PredictOutput({"p": tf.zeros([2])}).outputs.keys()
    dict_keys(['p'])

    Source: tf.estimator.export.PredictOutput.
    """

    outputs: Any


class ClassificationOutput(NamedTuple):
    """Describes an exported classification signature.

    Args:
      scores: A tensor [batch, num_classes]. Default: None.
      classes: A tensor [batch, num_classes]. Default: None.

    Example:

    >>> tf_xshard.compat.v1.ClassificationOutput(tf.zeros([2, 3])).scores.shape
    TensorShape([2, 3])

    Source: tf.estimator.export.ClassificationOutput.
    """

    scores: Any = None
    classes: Any = None


class RegressionOutput(NamedTuple):
    """Describes an exported regression signature.

    Args:
      value: A tensor [batch].

    Example:

    >>> tf_xshard.compat.v1.RegressionOutput(tf.zeros([2])).value.shape
    TensorShape([2])

    Source: tf.estimator.export.RegressionOutput.
    """

    value: Any


def replaced(spec: Any, **fields: Any) -> Any:
    """Copies a spec of any type, with other values in some fields."""
    if hasattr(spec, "_replace"):
        return spec._replace(**fields)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        return dataclasses.replace(spec, **fields)
    spec = copy.copy(spec)
    for name, value in fields.items():
        setattr(spec, name, value)
    return spec


def check_metric(name: str, pair: Any) -> None:
    """Checks that a metric is a (value, update operation) pair."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            f"Metric {name!r} must be a (value, update operation) pair, as"
            f" tf.compat.v1.metrics makes them, got {pair!r}."
        )


class TPUEstimatorSpec(NamedTuple):
    """Holds the result of a `TPUEstimator`'s model_fn.

    `TPUEstimator` checks that a spec has the fields that its mode needs.

    Args:
      mode: One of `ModeKeys`.
      predictions: A dict of tensors [batch, ...]. Default: None.
      loss: A scalar tensor. Default: None.
      train_op: The operation of a training step. Default: None.
      eval_metrics: A pair of a function and its tensors (a list of positional
        or a dict of keyword arguments). The function returns a dict of
        `tf.compat.v1.metrics` pairs. Default: None.
      export_outputs: Signatures, not used by `TPUEstimator`. Default: None.
      scaffold_fn: A function without arguments that returns a
        `tf.compat.v1.train.Scaffold`. Default: None.
      host_call: A pair like `eval_metrics`. In training, its function gets the
        tensors of all shards, concatenated along axis 0. The function returns
        None, or an operation (to write summaries) that runs once a step.
        Default: None.
      training_hooks: Training hooks. Default: none.
      evaluation_hooks: Evaluation hooks. Default: none.
      prediction_hooks: Prediction hooks. Default: none.

    Example:

    >>> spec = tf_xshard.compat.v1.TPUEstimatorSpec(
    ...     "infer", predictions={"p": tf.zeros([2])})
    >>> spec.as_estimator_spec().mode
    'infer'

    Source: tf.compat.v1.estimator.tpu.TPUEstimatorSpec.
    """

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metrics: tuple[Callable[..., Any], Any] | None = None
    export_outputs: dict[str, Any] | None = None
    scaffold_fn: Callable[[], Any] | None = None
    host_call: tuple[Callable[..., Any], Any] | None = None
    training_hooks: tuple[Any, ...] | None = None
    evaluation_hooks: tuple[Any, ...] | None = None
    prediction_hooks: tuple[Any, ...] | None = None

    def as_estimator_spec(self) -> EstimatorSpec:
        """Converts this spec to an `EstimatorSpec`, for one device.

        Calls `eval_metrics`, `host_call` and `scaffold_fn` in the current
        graph.

        Returns:
          An `EstimatorSpec`, whose train_op includes `host_call`'s operation.

        Raises:
          TypeError: If `eval_metrics` or `host_call` is not a pair of a
            function and a list or dict of tensors.
        """
        metrics = call_pair("eval_metrics", self.eval_metrics)
        train_op = self.train_op
        if self.host_call is not None:
            check_call("host_call", self.host_call)
        if train_op is not None:
            train_op = with_host_call(train_op, self.host_call)
        return EstimatorSpec(
            mode=self.mode,
            predictions=self.predictions,
            loss=self.loss,
            train_op=train_op,
            eval_metric_ops=metrics,
            export_outputs=self.export_outputs,
            scaffold=self.scaffold_fn() if self.scaffold_fn else None,
            training_hooks=tuple(self.training_hooks or ()),
            evaluation_hooks=tuple(self.evaluation_hooks or ()),
            prediction_hooks=tuple(self.prediction_hooks or ()),
        )


def with_host_call(train_op: Any, pair: Any) -> tf.Operation:
    """Adds the operation that a `host_call` returns to a training step."""
    result = call_pair("host_call", pair)
    after = [] if result is None else tf.nest.flatten(result)
    return tf.group(train_op, *after)


def call_pair(field: str, pair: Any) -> Any:
    """Calls the function of a (function, tensors) pair, or returns None."""
    if pair is None:
        return None
    check_call(field, pair)
    function, tensors = pair
    if isinstance(tensors, dict):
        return function(**tensors)
    return function(*tensors)


def check_call(field: str, pair: Any) -> None:
    """Checks that a value is a (function, tensors) pair."""
    if (
        not isinstance(pair, (tuple, list))
        or len(pair) != 2
        or not callable(pair[0])
        or not isinstance(pair[1], (tuple, list, dict))
    ):
        raise TypeError(
            f"{field} must be a pair of a function and a list or dict of its"
            f" tensors, got {pair!r}."
        )
