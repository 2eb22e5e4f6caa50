"""Defines `TPUEstimator`, which trains, evaluates and predicts without a TPU.

train     input_fn(params) --> features, labels --+--> shard 0: model_fn --+
                               of the global batch +--> shard 1: model_fn --+-->
                                                   ...                     |
                                               train_op, loss, host_call <-+
evaluate  one model_fn for the whole batch --> eval_metrics, the mean loss
predict   one model_fn for the whole batch --> a dict for each row
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_xshard import checks
from tf_xshard.compat.v1.estimator import estimator_spec
from tf_xshard.compat.v1.estimator import model_calls
from tf_xshard.compat.v1.estimator import model_directory
from tf_xshard.compat.v1.estimator import sessions as estimator_sessions
from tf_xshard.compat.v1.estimator import tpu_config
from tf_xshard.private.tensorflow import autograph


def metrics_of(spec: Any) -> dict[str, tuple[Any, Any]]:
    """Returns a spec's metrics, including the mean loss."""
    if hasattr(spec, "eval_metrics"):
        found = estimator_spec.call_pair("eval_metrics", spec.eval_metrics)
    else:
        found = spec.eval_metric_ops
    if found is not None and not isinstance(found, dict):
        raise TypeError(f"Metrics must be a dict of pairs, got {found!r}.")
    for name, pair in (found or {}).items():
        estimator_spec.check_metric(name, pair)
    found = dict(found or {})
    if "loss" in found or "global_step" in found:
        raise ValueError(
            '"loss" and "global_step" are always in the results. Give your'
            " metric another name."
        )
    return {**found, "loss": tf.compat.v1.metrics.mean(spec.loss)}


def select_predictions(
    predictions: Any, keys: Sequence[str] | str | None
) -> Any:
    """Checks the predictions and selects the given keys."""
    if isinstance(predictions, dict):
        tensors = list(predictions.values())
    else:
        tensors = [predictions]
    if not tensors or not all(isinstance(one, tf.Tensor) for one in tensors):
        raise TypeError(
            "predictions must be a tensor, or a dict of tensors that is not"
            f" empty, got {predictions!r}."
        )
    if keys is None:
        return predictions
    keys = [keys] if isinstance(keys, str) else list(keys)
    if not isinstance(predictions, dict):
        raise ValueError(
            "predict_keys is for predictions that are a dict, but model_fn's"
            " predictions are one tensor. Leave predict_keys out."
        )
    unknown = [key for key in keys if key not in predictions]
    if unknown:
        raise ValueError(
            f"predict_keys has {unknown}, but the predictions are"
            f" {list(predictions)}."
        )
    return {key: predictions[key] for key in keys}


def rows(batch: Any) -> Iterator[Any]:
    """Yields the predictions of each row of a batch."""
    arrays = batch if isinstance(batch, dict) else {"": batch}
    counts = {
        key: len(array) if np.ndim(array) else "no rows"
        for key, array in arrays.items()
    }
    if len(set(counts.values())) > 1 or "no rows" in counts.values():
        raise ValueError(
            "Predictions have different numbers of rows, so single examples"
            f" can't be yielded: {counts}. Pass yield_single_examples=False."
        )
    for index in range(len(next(iter(arrays.values())))):
        if isinstance(batch, dict):
            yield {key: array[index] for key, array in batch.items()}
        else:
            yield batch[index]


_Modes = estimator_spec.ModeKeys


class TPUEstimator(model_directory.ModelDirectory):
    """Trains, evaluates and predicts with a model_fn.

    `train` builds one graph with `config.tpu_config.num_shards` shards (see
    `shard`), so `CrossShardOptimizer` sums as on a TPU. `evaluate` and
    `predict` build the model once. `model_dir` keeps variables between calls.

    Args:
      model_fn: A function of `features` and, optionally, `labels`, `mode`,
        `params` and `config`. It returns a `TPUEstimatorSpec`, or an
        `EstimatorSpec`, which has no host_call. In training, the function gets
        a shard's part of the batch, and the part's size as
        `params["batch_size"]`.
      model_dir: The directory of checkpoints and summaries. Default:
        `config.model_dir`.
      config: A `RunConfig`. Default: `RunConfig()`, which has one shard.
      params: A dict for `model_fn` and `input_fn`, without "batch_size".
        Default: none.
      use_tpu: If False, the whole batch is one shard. Default: True.
      train_batch_size: The global batch size, which the number of shards must
        divide. Required by `train`. Default: None.
      eval_batch_size: The batch size of `evaluate`. Default: None.
      predict_batch_size: The batch size of `predict`. Default: None.
      **kwargs: Other arguments of the original. If they would change something,
        they raise an error that says what to use instead.

    Raises:
      TypeError: If model_fn is not callable or requires an argument that
        TPUEstimator does not pass. If config is not a `RunConfig`, or if an
        argument is unknown.
      ValueError: If there is no model_dir, params has "batch_size", the number
        of shards does not divide train_batch_size, or an argument of the
        original is not supported.

    Example:

    >>> import tempfile
    >>> v1 = tf_xshard.compat.v1
    >>> def model_fn(features, labels, mode):
    ...     w = tf.compat.v1.get_variable("w", [], initializer=tf.ones)
    ...     loss = tf.reduce_mean((w * features - labels) ** 2)
    ...     optimizer = v1.CrossShardOptimizer(
    ...         tf.compat.v1.train.GradientDescentOptimizer(0.1))
    ...     step = tf.compat.v1.train.get_global_step()
    ...     return v1.TPUEstimatorSpec(
    ...         mode, {"y": w * features}, loss, optimizer.minimize(loss, step))
    >>> def input_fn(params):
    ...     x = tf.data.Dataset.from_tensors((1.0, 3.0)).repeat()
    ...     return x.batch(params["batch_size"], drop_remainder=True)
    >>> estimator = v1.TPUEstimator(
    ...     model_fn, tempfile.mkdtemp(), train_batch_size=4,
    ...     config=v1.RunConfig(tpu_config=v1.TPUConfig(num_shards=2)))
    >>> estimator.train(input_fn, max_steps=50).latest_checkpoint()[-7:]
    'ckpt-50'
    >>> float(estimator.get_variable_value("w").round(3))
    3.0

    Source: tf.compat.v1.estimator.tpu.TPUEstimator.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | os.PathLike[str] | None = None,
        config: tpu_config.RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        use_tpu: bool = True,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        tpu_config.refuse("TPUEstimator", kwargs, tpu_config.OF_TPU_ESTIMATOR)
        config = tpu_config.RunConfig() if config is None else config
        if not isinstance(config, tpu_config.RunConfig):
            raise TypeError(
                "config must be a tf_xshard.compat.v1.RunConfig, got"
                f" {config!r}."
            )
        super().__init__(model_dir or config.model_dir)
        self._config = config
        self._sessions = estimator_sessions.Sessions(config, self.model_dir)
        self._params = copy.deepcopy(dict(params or {}))
        self._train_batch_size = train_batch_size
        self._calls = model_calls.ModelCalls(
            model_fn,
            config,
            self._params,
            (use_tpu and config.tpu_config.num_shards) or 1,
            {
                _Modes.TRAIN: ("train_batch_size", train_batch_size),
                _Modes.EVAL: ("eval_batch_size", eval_batch_size),
                _Modes.PREDICT: ("predict_batch_size", predict_batch_size),
            },
        )

    @property
    def config(self) -> tpu_config.RunConfig:
        """The `RunConfig`."""
        return self._config

    @property
    def params(self) -> dict[str, Any]:
        """A copy of `params`."""
        return copy.deepcopy(self._params)

    @autograph.entry_point
    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Any] | None = None,
    ) -> TPUEstimator:
        """Trains until the input ends, or for a number of steps.

        Continues from the newest checkpoint in model_dir.

        Args:
          input_fn: A function of any of `params`, `mode` and `config`. It
            returns a `tf.data.Dataset` or tensors, either features or a pair of
            features and labels. `params["batch_size"]` is the global size.
          hooks: `tf.compat.v1.train.SessionRunHook`s. Default: none.
          steps: The number of steps to train. Default: None, no limit.
          max_steps: The global step to end at. Default: None, no limit.
          saving_listeners: `tf.compat.v1.train.CheckpointSaverListener`s, which
            are called before and after each checkpoint is saved. Training stops
            if `after_save` returns True. Default: none.

        Returns:
          This object.

        Raises:
          TypeError: If model_fn returns something other than a spec, or a
            listener is not a `CheckpointSaverListener`.
          ValueError: If both steps and max_steps are given, or either is not a
            positive int. If train_batch_size is None, or rows can't be split
            over the shards. If the spec lacks a loss or a train_op, or shards
            combine no gradients.
        """
        if steps is not None and max_steps is not None:
            raise ValueError("Pass steps or max_steps, not both.")
        if self._train_batch_size is None:
            raise ValueError(
                "train() needs TPUEstimator(train_batch_size=...), got None."
            )
        checks.count("steps", steps, None)
        checks.count("max_steps", max_steps, None)
        listeners = tuple(saving_listeners or ())
        for one in listeners:
            if not isinstance(one, tf.compat.v1.train.CheckpointSaverListener):
                raise TypeError(
                    "saving_listeners must be a list of tf.compat.v1.train."
                    f"CheckpointSaverListener, got {one!r}. Pass other hooks in"
                    " `hooks`."
                )
        if max_steps is not None and self._saved_step() >= max_steps:
            logging.info("Training has already reached step %d.", max_steps)
            return self
        with self._sessions.graph():
            features, labels = self._calls.inputs(input_fn, _Modes.TRAIN)
            spec, train_op, loss = self._calls.build_training(features, labels)
            if steps is not None or max_steps is not None:
                hooks = [
                    *(hooks or ()),
                    tf.compat.v1.train.StopAtStepHook(steps, max_steps),
                ]
            with self._sessions.for_training(
                spec, loss, hooks, listeners
            ) as session:
                while not session.should_stop():
                    session.run([train_op, loss])
        return self

    @autograph.entry_point
    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluates a checkpoint.

        Args:
          input_fn: See `train`.
          steps: The number of batches. Default: None, until the input ends.
          hooks: Hooks, as in `train`. Default: none.
          checkpoint_path: The checkpoint. Default: the newest in model_dir.
          name: A suffix of the summary's directory. Default: none.

        Returns:
          A dict of the metrics, the batches' mean "loss", and "global_step".

        Raises:
          TypeError: If model_fn returns something other than a spec, or
            eval_metrics or a metric is not a pair.
          ValueError: If there is no checkpoint, batch or loss, steps is not a
            positive int, or a metric is called "loss" or "global_step".
        """
        checks.count("steps", steps, None)
        path = os.fspath(checkpoint_path or self._checkpoint())
        with self._sessions.graph():
            features, labels = self._calls.inputs(input_fn, _Modes.EVAL)
            spec = self._calls.call_model_fn(features, labels, _Modes.EVAL)
            metrics = metrics_of(spec)
            updates = [update for _, update in metrics.values()]
            values = {key: value for key, (value, _) in metrics.items()}
            values["global_step"] = tf.compat.v1.train.get_global_step()
            all_hooks = [*(spec.evaluation_hooks or ()), *(hooks or ())]
            with self._sessions.from_checkpoint(
                spec, all_hooks, path
            ) as session:
                count = 0
                while count != steps and not session.should_stop():
                    try:
                        session.run(updates)
                    except tf.errors.OutOfRangeError:
                        break
                    count += 1
                if not count:
                    raise ValueError(
                        "input_fn gives no batch, so there is nothing to"
                        " evaluate. Lower eval_batch_size."
                    )
                results = session.run_step_fn(
                    lambda step_context: step_context.session.run(values)
                )
        folder = f"eval_{name}" if name else "eval"
        estimator_sessions.write_summary(
            os.path.join(self._model_dir, folder), results
        )
        logging.info("Evaluated %s: %s", path, results)
        return results

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | str | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Predicts until the input ends.

        Args:
          input_fn: See `train`; labels are not used.
          predict_keys: Keys to yield, if predictions are a dict. Default: all.
          hooks: Hooks, as in `train`. Default: none.
          checkpoint_path: The checkpoint. Default: the newest in model_dir.
          yield_single_examples: If True (default), yields rows, not batches.

        Yields:
          An array, or a dict of arrays, for one row or one batch.

        Raises:
          TypeError: If model_fn returns something other than a spec, or if the
            predictions are neither a tensor nor a dict of tensors.
          ValueError: If there is no checkpoint, a key is unknown, or single
            rows are requested but predictions differ in their number of rows.
        """
        path = os.fspath(checkpoint_path or self._checkpoint())
        with self._sessions.graph():
            features, _ = self._calls.inputs(input_fn, _Modes.PREDICT)
            spec = self._calls.call_model_fn(features, None, _Modes.PREDICT)
            predictions = select_predictions(spec.predictions, predict_keys)
            all_hooks = [*(spec.prediction_hooks or ()), *(hooks or ())]
            monitored = self._sessions.from_checkpoint(spec, all_hooks, path)
        with monitored as session:
            while not session.should_stop():
                try:
                    batch = session.run(predictions)
                except tf.errors.OutOfRangeError:
                    return
                if yield_single_examples:
                    yield from rows(batch)
                else:
                    yield batch
