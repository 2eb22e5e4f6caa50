"""`TPUEstimatorSpec`, the result of a TPUEstimator's model_fn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tf_xshard.compat.v1.estimator import estimator_spec


class TPUEstimatorSpec(NamedTuple):
    """The result of a `TPUEstimator`'s model_fn.

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
      host_call: A pair like `eval_metrics`. In training its function gets the
        tensors of all shards, concatenated along axis 0. It returns None or an
        operation (to write summaries) to run once a step. Default: None.
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

    def as_estimator_spec(self) -> estimator_spec.EstimatorSpec:
        """Converts this spec to an `EstimatorSpec`, for one device.

        Calls `eval_metrics`, `host_call`, `scaffold_fn` in the current graph.

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
        return estimator_spec.EstimatorSpec(
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
