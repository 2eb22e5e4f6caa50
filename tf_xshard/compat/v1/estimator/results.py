"""Metrics and predictions for TPUEstimator's `evaluate` and `predict`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_xshard.compat.v1.estimator import estimator_spec
from tf_xshard.compat.v1.estimator import tpu_estimator_spec


def metrics(spec: Any) -> dict[str, tuple[Any, Any]]:
    """Returns a spec's metrics, including the mean loss."""
    if hasattr(spec, "eval_metrics"):
        found = tpu_estimator_spec.call_pair("eval_metrics", spec.eval_metrics)
    else:
        found = spec.eval_metric_ops
    if found is not None and not isinstance(found, dict):
        raise TypeError(f"Metrics must be a dict of pairs, got {found!r}.")
    for name, pair in (found or {}).items():
        estimator_spec.check_metric(name, pair)
    found = dict(found or {})
    if "loss" in found or "global_step" in found:
        raise ValueError(
            '"loss" and "global_step" are always in the results. Give that'
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
            " are one tensor. Leave it out."
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
