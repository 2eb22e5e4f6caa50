"""A group's weights, or all groups' together, as a Keras model."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import agn_optimizer
from tf_xshard import inner_update
from tf_xshard import state_variables


class Ensemble(keras.Model):
    """A model whose outputs are the mean of several models' outputs.

    It computes with the loss and metrics of the model that it is made of.

    Args:
      model: A compiled or uncompiled `keras.Model`.
      num_members: How many models it has room for.
    """

    def __init__(self, model: keras.Model, num_members: int):
        super().__init__(name=f"{model.name}_ensemble")
        with inner_update.untracked():
            self._of = model
            self._members = [
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
        self._num_trainable = len(model.trainable_variables)
        self.compile()

    def show(self, weights: Sequence[Sequence[np.ndarray]]) -> None:
        """Gives every member its weights.

        Args:
          weights: For each member the values of `model.weights`.
        """
        for member, values in zip(self._members, weights, strict=True):
            of_weight = {
                id(weight): value
                for weight, value in zip(self._of.weights, values, strict=True)
            }
            for like, variable in zip(_ordered(self._of), member, strict=True):
                # Random states are no weights; a prediction draws nothing.
                if id(like) in of_weight:
                    variable.assign(of_weight[id(like)])

    def call(self, *args, **kwargs):
        """The mean of what the members return.

        Args:
          *args: What the model takes.
          **kwargs: The same.

        Returns:
          The model's outputs, averaged.
        """
        outputs = [
            self._of.stateless_call(
                [v.value for v in values[: self._num_trainable]],
                [v.value for v in values[self._num_trainable :]],
                *args,
                **{**kwargs, "training": False},
            )[0]
            for values in self._members
        ]
        return keras.tree.map_structure(_mean, *outputs)

    @property
    def metrics(self):
        """The model's."""
        return self._of.metrics

    def test_step(self, data):
        """One step of `evaluate`.

        Args:
          data: From Keras.

        Returns:
          The metrics so far.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        outputs = self(x)
        loss = self._of.compute_loss(
            x=x,
            y=y,
            y_pred=outputs,
            sample_weight=sample_weight,
            training=False,
        )
        for metric in self._of.metrics:
            if metric.name == "loss":
                # Keras divides every loss by the number of replicas.
                metric.update_state(
                    loss * tf.distribute.get_strategy().num_replicas_in_sync,
                    sample_weight=tf.shape(keras.tree.flatten(x)[0])[0],
                )
        return self._of.compute_metrics(x, y, outputs, sample_weight)


def _ordered(model: keras.Model) -> list:
    return [*model.trainable_variables, *model.non_trainable_variables]


def _mean(*outputs):
    # One by one, in the outputs' own type: integers have no mean.
    total = outputs[0]
    for output in outputs[1:]:
        total = total + output
    return total / len(outputs)


def plain_copy(
    model: keras.Model, weights: Sequence[np.ndarray], slots: dict
) -> keras.Model:
    """A model with other weights that knows neither strategy nor tf_xshard.

    Args:
      model: The model, compiled or not.
      weights: The values of `model.weights`.
      slots: The values of its optimizer's variables, by their `id`.

    Returns:
      A new model, compiled with the innermost optimizer if the first one was.
    """
    config = keras.saving.serialize_keras_object(model)
    optimizer = getattr(model, "optimizer", None)
    compiled = config.get("compile_config")
    if compiled and optimizer is not None:
        optimizer = _unwrapped(optimizer)
        compiled["optimizer"] = keras.saving.serialize_keras_object(optimizer)
    copy = keras.saving.deserialize_keras_object(config)
    if not copy.built:
        copy.build_from_config(model.get_build_config())
    copy.set_weights(weights)
    if compiled and optimizer is not None:
        if not copy.optimizer.built:
            copy.optimizer.build(copy.trainable_variables)
        for mine, its in zip(
            state_variables.of_optimizer(optimizer),
            state_variables.of_optimizer(copy.optimizer),
            strict=True,
        ):
            its.assign(slots[id(mine)])
    return copy


def _unwrapped(optimizer) -> keras.optimizers.Optimizer:
    """The optimizer that updates the model, of a stack of wrappers."""
    while inner_update.is_wrapper(optimizer):
        optimizer = (
            optimizer.local_optimizer
            if isinstance(optimizer, agn_optimizer.AGNOptimizer)
            else optimizer.inner_optimizer
        )
    return optimizer
