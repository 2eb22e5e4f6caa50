"""Defines the ensemble of all groups, as a Keras model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard.private.keras import fit_internals


class Ensemble(keras.Model):
    """Averages its members' outputs and regularization losses, as a model."""

    def __init__(self, model: keras.Model, num_members: int) -> None:
        super().__init__(name=f"{model.name}_ensemble")
        members = [
            [
                keras.Variable(
                    tf.zeros(like.shape, like.dtype),
                    dtype=like.dtype,
                    trainable=False,
                )
                for like in _ordered(model)
            ]
            for _ in range(num_members)
        ]
        for name, value in {
            "_of": model,
            "_variables_of": _ordered(model),
            "_metrics_of": list(model.metrics),
            "_members": members,
        }.items():
            # Keras would track them as parts of this model.
            object.__setattr__(self, name, value)
        parameters = inspect.signature(model.call).parameters.values()
        self._options = (
            {"training": False}
            if any(
                p.name == "training" or p.kind == p.VAR_KEYWORD
                for p in parameters
            )
            else {}
        )
        self.compile()

    def is_of(self, model: keras.Model, num_members: int) -> bool:
        """Returns True if the model still has these variables and metrics."""
        return (
            len(self._members) == num_members
            and _are(self._variables_of, _ordered(model))
            and _are(self._metrics_of, model.metrics)
        )

    def show(self, weights: Sequence[Sequence[np.ndarray]]) -> None:
        """Assigns every member its weights."""
        for member, values in zip(self._members, weights, strict=True):
            of_weight = {
                id(weight): value
                for weight, value in zip(self._of.weights, values, strict=True)
            }
            for like, variable in zip(self._variables_of, member, strict=True):
                # Random states are not weights; predictions do not use them.
                if id(like) in of_weight:
                    variable.assign(of_weight[id(like)])

    def _outputs_and_losses(self, x: Any) -> tuple[Any, list]:
        """Returns the mean outputs and the mean regularization losses."""
        outputs, losses = [], []
        for member in self._members:
            mapping = zip(self._variables_of, member, strict=True)
            with keras.StatelessScope(
                [(like, one.value) for like, one in mapping],
                collect_losses=True,
            ):
                outputs.append(self._of(x, **self._options))
                losses.append([tf.reduce_sum(one) for one in self._of.losses])
        mean = keras.tree.map_structure(_mean, *outputs)
        return mean, [_mean(*parts) for parts in zip(*losses, strict=True)]

    def call(self, x: Any) -> Any:
        """Returns the mean of the members' outputs."""
        return self._outputs_and_losses(x)[0]

    @property
    def metrics(self) -> list[keras.Metric]:
        """The original model's metrics."""
        return self._of.metrics

    def test_step(self, data: Any) -> dict:
        """Computes a batch's metrics, with the original model's loss."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        outputs, losses = self._outputs_and_losses(x)
        with fit_internals.losses_instead(self._of, losses):
            loss = self._of.compute_loss(
                x=x,
                y=y,
                y_pred=outputs,
                sample_weight=sample_weight,
                training=False,
            )
        num_rows = tf.shape(keras.tree.flatten(x)[0])[0]
        fit_internals.update_loss_metric(self._of, loss, num_rows)
        return self._of.compute_metrics(x, y, outputs, sample_weight)


def _ordered(model: keras.Model) -> list:
    return [*model.trainable_variables, *model.non_trainable_variables]


def _are(some: Sequence, others: Sequence) -> bool:
    return len(some) == len(others) and all(
        one is other for one, other in zip(some, others, strict=True)
    )


def _mean(*outputs: Any) -> Any:
    total = outputs[0]
    for output in outputs[1:]:
        total = total + output
    return total / len(outputs)
