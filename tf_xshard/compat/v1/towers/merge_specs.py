"""Merges the specs of a replicated model_fn's towers into one spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.compat.v1.estimator import estimator_spec


def training(specs: Sequence[Any]) -> Any:
    """Returns the last tower's spec, with all towers' update and loss."""
    return estimator_spec.replaced(specs[-1], loss=_loss(specs))


def evaluation(
    specs: Sequence[Any], metrics: Sequence[Sequence[tf.Variable]]
) -> Any:
    """Returns the first tower's spec, with all towers' loss and metrics."""
    shapes = [[(v.shape, v.dtype.base_dtype) for v in vs] for vs in metrics]
    if any(of_tower != shapes[0] for of_tower in shapes):
        raise ValueError(
            "Towers make different metric variables. Expected the same local"
            f" variables in each, but got {[len(vs) for vs in metrics]}:"
            f" {[[v.name for v in vs] for vs in metrics]}. model_fn must make"
            " the same metrics each time it is called."
        )
    first = specs[0].eval_metric_ops or {}
    updates = []
    for spec in specs:
        for name, pair in (spec.eval_metric_ops or {}).items():
            estimator_spec.check_metric(name, pair)
            updates.append(pair[1])
    with tf.control_dependencies(updates):
        # All metric variables are read before the other towers' variables are
        # set to zero.
        additions = [
            (variables, [tf.identity(v.read_value()) for v in variables[1:]])
            for variables in zip(*metrics, strict=True)
        ]
    pooled = []
    for (target, *others), values in additions:
        with tf.control_dependencies(values):
            pooled.append(target.assign_add(tf.add_n(values)))
            pooled += [v.assign(tf.zeros_like(v)) for v in others]
    with tf.control_dependencies([tf.group(*updates)]):
        update = tf.group(*pooled, name="eval_metric_reduction")
    return estimator_spec.replaced(
        specs[0],
        loss=_loss(specs),
        eval_metric_ops={
            name: (value, update) for name, (value, _) in first.items()
        },
    )


def prediction(specs: Sequence[Any]) -> Any:
    """Returns the first tower's spec, with all outputs, [batch, ...]."""
    fields = {"predictions": _concatenated([s.predictions for s in specs])}
    if specs[0].export_outputs is not None:
        fields["export_outputs"] = {
            key: _export_output(key, [s.export_outputs[key] for s in specs])
            for key in specs[0].export_outputs
        }
    return estimator_spec.replaced(specs[0], **fields)


def _concatenated(structures: Sequence[Any]) -> Any:
    """Joins the towers' [batch / num_towers, ...] tensors to [batch, ...]."""
    return tf.nest.map_structure(
        lambda *parts: None if parts[0] is None else tf.concat(parts, 0),
        *structures,
    )


def _export_output(key: str, outputs: Sequence[Any]) -> Any:
    """Concatenates the towers' outputs in an object of the same type."""
    kind = type(outputs[0])
    for fields in (("scores", "classes"), ("value",), ("outputs",)):
        if all(hasattr(outputs[0], field) for field in fields):
            return kind(
                **{
                    field: _concatenated([getattr(o, field) for o in outputs])
                    for field in fields
                }
            )
    raise ValueError(
        f"Export output {key!r} is a {kind.__name__}. Supported: PredictOutput,"
        " ClassificationOutput and RegressionOutput."
    )


def _loss(specs: Sequence[Any]) -> tf.Tensor | None:
    """Returns the towers' summed loss, or None if a tower has no loss."""
    if any(spec.loss is None for spec in specs):
        return None
    return tf.add_n([spec.loss for spec in specs], name="loss")
