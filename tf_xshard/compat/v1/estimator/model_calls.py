"""Calls a TPUEstimator's model_fn and input_fn, and checks what they return."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from tf_xshard import checks
from tf_xshard.compat.v1.estimator import estimator_spec
from tf_xshard.compat.v1.estimator import sessions as estimator_sessions
from tf_xshard.compat.v1.estimator import tpu_config
from tf_xshard.compat.v1.sharding import traced_shards
from tf_xshard.compat.v1.sharding.shard import shard

_Modes = estimator_spec.ModeKeys
_REQUIRED = {
    _Modes.TRAIN: ("loss", "train_op"),
    _Modes.EVAL: ("loss",),
    _Modes.PREDICT: ("predictions",),
}
_SPECS = (estimator_spec.EstimatorSpec, estimator_spec.TPUEstimatorSpec)
_OPTIONAL_ARGUMENTS = ("labels", "mode", "params", "config")


class ModelCalls:
    """Holds a model_fn with the config, params and batch sizes of its calls."""

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
                f"{name}={size} can't be divided by the {num_shards} shards."
                f" Pass a multiple of {num_shards}."
            )
        self._model_fn = model_fn
        self._accepted = _accepted_arguments(model_fn)
        self._config = config
        self._params = params
        self._num_shards = num_shards
        self._batch_sizes = batch_sizes

    def _params_of(self, mode: str, num_shards: int = 1) -> dict[str, Any]:
        _, size = self._batch_sizes[mode]
        params = copy.deepcopy(dict(self._params))
        if size is not None:
            params["batch_size"] = size // num_shards
        return params

    def inputs(self, input_fn: Callable[..., Any], mode: str) -> tuple:
        """Returns (features, labels) of an input_fn; labels can be None."""
        known = {
            "params": self._params_of(mode),
            "mode": mode,
            "config": self._config,
        }
        data = input_fn(**{k: known[k] for k in _taken(input_fn, known)})
        if isinstance(data, tf.data.Dataset):
            iterator = tf.compat.v1.data.make_initializable_iterator(data)
            tf.compat.v1.add_to_collection(
                estimator_sessions.INPUTS, iterator.initializer
            )
            data = iterator.get_next()
        if isinstance(data, (tuple, list)):
            if len(data) != 2:
                raise ValueError(
                    "input_fn must give features, or a pair of features and"
                    f" labels, got {len(data)} values. Put several features"
                    " into a dict."
                )
            return tuple(data)
        return data, None

    def call_model_fn(
        self, features: Any, labels: Any, mode: str, num_shards: int = 1
    ) -> Any:
        """Calls model_fn and checks the spec that it returns."""
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
                " Add the argument, or give no labels."
            )
        spec = self._model_fn(features, **arguments)
        required = _REQUIRED[mode]
        if not isinstance(spec, _SPECS):
            raise TypeError(
                f"model_fn must return a TPUEstimatorSpec, got {spec!r}."
            )
        for field in required:
            if getattr(spec, field) is None:
                raise ValueError(
                    f"The spec that model_fn returns for mode {mode!r} has no"
                    f" {field}."
                )
        if "loss" in required:
            _check_scalar(spec.loss)
        return spec

    def _check_that_shards_exchange(self) -> None:
        """Checks that shards exchange, since otherwise each trains alone."""
        shard_here = traced_shards.current()
        assert shard_here is not None
        if self._num_shards > 1 and not shard_here.num_exchanges:
            raise ValueError(
                f"model_fn trains on {self._num_shards} shards, but its"
                " train_op combines no gradients over them with a"
                " CrossShardOptimizer, so each shard would train alone. Wrap"
                " the optimizer: tf_xshard.compat.v1.CrossShardOptimizer("
                "optimizer). Don't sum its gradients with cross_replica_sum."
            )

    def _check_can_be_split(self, value: Any) -> None:
        if isinstance(value, (tf.SparseTensor, tf.RaggedTensor)):
            raise TypeError(
                f"input_fn gives a {type(value).__name__}, which can't be split"
                " over shards. Make it dense."
            )
        if value is None:
            raise ValueError(
                "input_fn gives None where a tensor is expected. Leave that"
                " feature out."
            )
        shape = tf.convert_to_tensor(value).shape
        if shape.rank == 0 or (
            shape.rank and (shape[0] or 0) % self._num_shards
        ):
            raise ValueError(
                f"input_fn gives a tensor of shape {shape}, whose rows can't be"
                f" split over {self._num_shards} shards. Batch the rows with"
                " dataset.batch(..., drop_remainder=True)."
            )

    def build_training(self, features: Any, labels: Any) -> tuple:
        """Builds all shards; returns a spec, the train_op and the mean loss."""
        given = [features] if labels is None else [features, labels]
        flat = tf.nest.flatten(given)
        for one in flat:
            self._check_can_be_split(one)
        specs: list[Any] = []

        def computation(*parts: tf.Tensor) -> list[Any]:
            mine, *its_labels = tf.nest.pack_sequence_as(given, parts)
            its_labels = its_labels[0] if its_labels else None
            spec = self.call_model_fn(
                mine, its_labels, _Modes.TRAIN, self._num_shards
            )
            specs.append(spec)
            self._check_that_shards_exchange()
            call = getattr(spec, "host_call", None)
            tensors = []
            if call is not None:
                estimator_spec.check_call("host_call", call)
                tensors = tf.nest.flatten(call[1])
            # A train_op can be a tensor, which would become an output.
            step = tf.group(spec.train_op)
            return [step, tf.reshape(spec.loss, [1]), *tensors]

        losses, *tensors = shard(computation, flat, self._num_shards)
        # `shard` joins the losses after the operations of all shards.
        train_op = losses.op
        spec = specs[0]
        call = getattr(spec, "host_call", None)
        if call is not None:
            function, structure = call
            packed = tf.nest.pack_sequence_as(structure, tensors)
            train_op = estimator_spec.with_host_call(
                train_op, (function, packed)
            )
        return spec, train_op, tf.reduce_mean(losses)


def _check_scalar(loss: Any) -> None:
    shape = tf.convert_to_tensor(loss).shape
    # A loss can be a scalar or have the shape [1]. Unknown sizes pass.
    if shape.rank not in (None, 0) and not shape.is_compatible_with([1]):
        raise ValueError(
            f"The spec's loss must be one number, got a tensor of shape"
            f" {shape}. Take its mean."
        )


def _accepted_arguments(model_fn: Callable[..., Any]) -> list[str]:
    """Lists model_fn's known arguments; raises for unknown required ones."""
    if not callable(model_fn):
        raise TypeError(f"model_fn must be a function, got {model_fn!r}.")
    _, *others = inspect.signature(model_fn).parameters.values()
    unknown = [
        one.name
        for one in others
        if one.name not in _OPTIONAL_ARGUMENTS
        and one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if unknown:
        raise TypeError(
            f"model_fn has arguments {unknown}, for which TPUEstimator has"
            " no value. After the features, it can have any of the arguments"
            f" {list(_OPTIONAL_ARGUMENTS)}."
        )
    return _taken(model_fn, _OPTIONAL_ARGUMENTS)


def _taken(function: Callable[..., Any], names: Iterable[str]) -> list[str]:
    """Lists the given names that a function takes as arguments."""
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return [name for name in names if takes_all or name in parameters]
