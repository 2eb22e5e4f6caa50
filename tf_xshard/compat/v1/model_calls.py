"""Calls a TPUEstimator's model_fn and input_fn, and checks what they return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard import checks
from tf_xshard.compat.v1 import estimator_spec
from tf_xshard.compat.v1 import tpu_config
from tf_xshard.compat.v1 import tpu_estimator_spec
from tf_xshard.compat.v1.shard import shard

_Modes = estimator_spec.ModeKeys
_REQUIRED = {
    _Modes.TRAIN: ("loss", "train_op"),
    _Modes.EVAL: ("loss",),
    _Modes.PREDICT: ("predictions",),
}
_OPTIONAL_ARGUMENTS = ("labels", "mode", "params", "config")


class ModelCalls:
    """A model_fn with what it is called with.

    Args:
      model_fn: See `TPUEstimator`.
      config: A `RunConfig`.
      params: A dict without "batch_size".
      num_shards: The number of shards in training.
      batch_sizes: A (name, batch size) pair for each mode; None is not known.

    Raises:
      TypeError, ValueError: See `TPUEstimator`.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        config: tpu_config.RunConfig,
        params: Mapping[str, Any],
        num_shards: int,
        batch_sizes: Mapping[str, tuple[str, int | None]],
    ) -> None:
        if "batch_size" in params:
            raise ValueError(
                'params must not have "batch_size": pass train_batch_size,'
                " eval_batch_size and predict_batch_size."
            )
        for name, size in batch_sizes.values():
            if size is not None:
                checks.positive_integer(name, size)
        name, size = batch_sizes[_Modes.TRAIN]
        if size is not None and size % num_shards:
            raise ValueError(
                f"{name}={size} cannot be divided by the {num_shards} shards."
            )
        self._model_fn = model_fn
        self._accepted = _accepted_arguments(model_fn)
        self._config = config
        self._params = params
        self._num_shards = num_shards
        self._batch_sizes = batch_sizes

    def _params_of(self, mode: str, num_shards: int = 1) -> dict[str, Any]:
        _, size = self._batch_sizes[mode]
        if size is None:
            return dict(self._params)
        return {**self._params, "batch_size": size // num_shards}

    def inputs(self, input_fn: Callable[..., Any], mode: str) -> tuple:
        """What an input_fn gives.

        Args:
          input_fn: See `TPUEstimator.train`.
          mode: One of `ModeKeys`.

        Returns:
          Features and labels; labels are None if there are none.

        Raises:
          ValueError: If it gives neither features nor a pair.
        """
        known = {
            "params": self._params_of(mode),
            "mode": mode,
            "config": self._config,
        }
        parameters = inspect.signature(input_fn).parameters
        data = input_fn(**{k: v for k, v in known.items() if k in parameters})
        if isinstance(data, tf.data.Dataset):
            iterator = tf.compat.v1.data.make_initializable_iterator(data)
            tf.compat.v1.add_to_collection(
                tf.compat.v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer
            )
            data = iterator.get_next()
        if isinstance(data, (tuple, list)):
            if len(data) != 2:
                raise ValueError(
                    "input_fn must give features, or a pair of features and"
                    f" labels, got {len(data)} values."
                )
            return tuple(data)
        return data, None

    def one(
        self, features: Any, labels: Any, mode: str, num_shards: int = 1
    ) -> Any:
        """What model_fn returns.

        Args:
          features: A structure of tensors.
          labels: A structure of tensors, or None.
          mode: One of `ModeKeys`.
          num_shards: By how much the batch has been divided.

        Returns:
          A spec that has all that the mode needs.

        Raises:
          TypeError: If it is no spec.
          ValueError: If a field is None, or model_fn takes no labels.
        """
        known = {
            "labels": labels,
            "mode": mode,
            "params": self._params_of(mode, num_shards),
            "config": self._config,
        }
        arguments = {k: v for k, v in known.items() if k in self._accepted}
        if labels is not None and "labels" not in arguments:
            raise ValueError(
                "input_fn gives labels, but model_fn has no argument `labels`."
            )
        spec = self._model_fn(features, **arguments)
        required = _REQUIRED[mode]
        if not all(hasattr(spec, field) for field in required):
            raise TypeError(
                f"model_fn must return a TPUEstimatorSpec, got {spec!r}."
            )
        for field in required:
            if getattr(spec, field) is None:
                raise ValueError(
                    f"The spec that model_fn returns for mode {mode!r} has no"
                    f" {field}."
                )
        return spec

    def of_all_shards(self, features: Any, labels: Any) -> tuple:
        """The training of all shards.

        Args:
          features: Those of the global batch.
          labels: Those of the global batch, or None.

        Returns:
          Shard 0's spec, the operation of a step, and the mean of the losses.

        Raises:
          TypeError, ValueError: See `one`.
        """
        given = [features] if labels is None else [features, labels]
        flat = tf.nest.flatten(given)
        specs: list[Any] = []

        def computation(*parts: tf.Tensor) -> list[Any]:
            mine, *its_labels = tf.nest.pack_sequence_as(given, parts)
            its_labels = its_labels[0] if its_labels else None
            spec = self.one(mine, its_labels, _Modes.TRAIN, self._num_shards)
            specs.append(spec)
            call = getattr(spec, "host_call", None)
            tensors = []
            if call is not None:
                tpu_estimator_spec.check_call("host_call", call)
                tensors = tf.nest.flatten(call[1])
            return [spec.train_op, tf.reshape(spec.loss, [1]), *tensors]

        losses, *tensors = shard(computation, flat, self._num_shards)
        # It comes after the operations of all shards.
        train_op = losses.op
        spec = specs[0]
        call = getattr(spec, "host_call", None)
        if call is not None:
            function, structure = call
            packed = tf.nest.pack_sequence_as(structure, tensors)
            after = tpu_estimator_spec.called("host_call", (function, packed))
            train_op = tf.group(train_op, *tf.nest.flatten(after or []))
        return spec, train_op, tf.reduce_mean(losses)


def _accepted_arguments(model_fn: Callable[..., Any]) -> tuple[str, ...]:
    """Which of the optional arguments a model_fn has."""
    if not callable(model_fn):
        raise TypeError(f"model_fn must be a function, got {model_fn!r}.")
    parameters = inspect.signature(model_fn).parameters
    unknown = [
        name
        for name, one in parameters.items()
        if name not in ("features", *_OPTIONAL_ARGUMENTS)
        and one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if unknown:
        raise TypeError(
            f"model_fn has arguments {unknown}, which nothing is passed to."
            f" Expected features and any of {list(_OPTIONAL_ARGUMENTS)}."
        )
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return tuple(
        one for one in _OPTIONAL_ARGUMENTS if takes_all or one in parameters
    )


def metrics(spec: Any) -> dict[str, tuple[Any, Any]]:
    """The metrics of a spec, with its mean loss.

    Args:
      spec: A `TPUEstimatorSpec` or an `EstimatorSpec`.

    Returns:
      A dict of (value, update operation) pairs.

    Raises:
      TypeError: If one is not such a pair.
      ValueError: If a name is taken.
    """
    if hasattr(spec, "eval_metrics"):
        found = tpu_estimator_spec.called("eval_metrics", spec.eval_metrics)
    else:
        found = spec.eval_metric_ops
    for name, pair in (found or {}).items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                f"Metric {name!r} must be a (value, update operation) pair, as"
                f" tf.compat.v1.metrics makes them, got {pair!r}."
            )
    found = dict(found or {})
    if "loss" in found or "global_step" in found:
        raise ValueError(
            '"loss" and "global_step" are always in the results. Give that'
            " metric another name."
        )
    return {**found, "loss": tf.compat.v1.metrics.mean(spec.loss)}


def selected(predictions: Any, keys: Sequence[str] | str | None) -> Any:
    """The predictions with these keys.

    Args:
      predictions: A tensor, or a dict of tensors.
      keys: A key, a list of keys, or None for all.

    Returns:
      A structure like `predictions`.

    Raises:
      ValueError: If a key is unknown.
    """
    if keys is None:
        return predictions
    keys = [keys] if isinstance(keys, str) else list(keys)
    known = list(predictions) if isinstance(predictions, dict) else []
    unknown = [key for key in keys if key not in known]
    if unknown:
        raise ValueError(
            f"predict_keys has {unknown}, but the predictions are {known}."
        )
    return {key: predictions[key] for key in keys}


def rows(batch: Any) -> Iterator[Any]:
    """The predictions of each row of a batch.

    Args:
      batch: An array, or a dict of arrays.

    Yields:
      An array or a dict.

    Raises:
      ValueError: If arrays have different numbers of rows.
    """
    arrays = batch if isinstance(batch, dict) else {"": batch}
    counts = {key: len(array) for key, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            "Predictions have different numbers of rows, so single examples"
            f" can't be yielded: {counts}. Pass yield_single_examples=False."
        )
    for index in range(next(iter(counts.values()))):
        if isinstance(batch, dict):
            yield {key: array[index] for key, array in batch.items()}
        else:
            yield batch[index]
