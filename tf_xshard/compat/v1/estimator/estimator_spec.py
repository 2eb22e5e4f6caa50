"""Specs, modes and export outputs of TensorFlow's removed Estimator."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple


class ModeKeys:
    """The modes in which a model_fn is called.

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
    """The result of a model_fn.

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
    """An exported signature with any outputs.

    Args:
      outputs: A tensor or a dict of tensors.

    Example:

    >>> tf_xshard.compat.v1.PredictOutput({"p": tf.zeros([2])}).outputs.keys()
    dict_keys(['p'])

    Source: tf.estimator.export.PredictOutput.
    """

    outputs: Any


class ClassificationOutput(NamedTuple):
    """An exported classification signature.

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
    """An exported regression signature.

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
