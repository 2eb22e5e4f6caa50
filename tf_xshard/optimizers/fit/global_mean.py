"""Defines `GlobalMean`, a loss averaged over the items of all replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import collectives
from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.collectives import recorder
from tf_xshard.distribute import site as site_lib
from tf_xshard.optimizers.fit import scalar_loss
from tf_xshard.private.keras import losses as keras_losses
from tf_xshard.private.tensorflow import autograph
from tf_xshard.private.tensorflow import custom_gradient
from tf_xshard.reduction import loss_records
from tf_xshard.reduction import reducer as reducer_lib

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
# `compile` chooses among three losses by the shapes of labels and predictions.
_CHOSEN_BY_SHAPE = ("crossentropy", "ce")


@keras.saving.register_keras_serializable("tf_xshard")
class GlobalMean(keras.losses.Loss):
    """Averages a loss over the items of all replicas.

    Keras divides each replica's loss by the replica's own number of items, and
    by the number of replicas. The result is the mean over the global batch only
    if all replicas have the same number of items. With a ragged last batch,
    padded tokens or sample weights, items of small shards weigh more. This
    class sums the number of items over the replicas, and divides by the sum.

    ```
    replica              0                1
    losses               1  2  3          8     (3 rows and 1 row)
    Keras                mean 2           mean 8           (2 + 8) / 2 = 5
    GlobalMean           sum 6            sum 8            (6 + 8) / 4 = 3.5
    ```

    The class counts items as Keras does on one device. If the loss's reduction
    is `"sum_over_batch_size"`, an item is an element that is not masked. If it
    is `"mean_with_sample_weight"`, the number of items is the sum of the
    weights. A loss with the reduction `"sum"` stays a sum.

    In a round of a `TowerOptimizer` with `reduction="mean"`, the mean is over
    the items of all calls of the round. In `fit`, the reported loss is the loss
    of one device. On one device, a GlobalMean equals the loss that it wraps.

    Each call of the loss sums a vector of two numbers over the replicas. A
    replica without items, or without rows, has a gradient of 0. However,
    BatchNormalization has nan statistics and gradients on a replica without
    rows, so drop a last batch that has fewer rows than replicas
    (`drop_remainder=True`).

    Args:
      loss: A loss as `model.compile(loss=...)` takes it: a name, a function of
        (y_true, y_pred) or a `keras.losses.Loss`. It returns a value for each
        row.
      group_assignment: The optimizer's groups, a `GroupAssignment` or a
        `[num_groups, replicas_per_group]` nested list of replica ids. The mean
        is over the replica's group. None (default) for one group of all
        replicas.
      communication: A `Communication`. Only its `timeout_seconds` is used, for
        the sum of the numbers of items. None (default) for its defaults.
      name: The loss's name. None (default) for the name of `loss`.

    Raises:
      TypeError: If an argument has the wrong type.
      ValueError: If `loss` is unknown, has the reduction `"none"`, or is a
        `ScalarLoss` or a `GlobalMean`. When called, if `loss` returns one
        number, or if the groups do not fit the strategy. The optimizer's
        `apply` raises ValueError if the optimizer has other groups or
        `loss_normalization="replica"`.

    Example:

    >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Input((2,)),
    ...                               keras.layers.Dense(1)])
    ...     model.compile(
    ...         tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(0.1)),
    ...         loss=tf_xshard.GlobalMean("mse"))
    >>> history = model.fit(np.ones([7, 2]), np.ones([7, 1]), batch_size=4,
    ...                     verbose=0)

    Source: "sum_over_batch_size" of `keras.losses.Loss` on one device; for
    several replicas, `tf.nn.compute_average_loss` with a global batch size.
    """

    def __init__(
        self,
        loss: str | Callable[[Any, Any], Any] | keras.losses.Loss,
        group_assignment: (
            group_assignment_lib.GroupAssignment | Sequence | np.ndarray | None
        ) = None,
        *,
        communication: communication_lib.Communication | None = None,
        name: str | None = None,
    ) -> None:
        checked = _checked(loss)
        if group_assignment is not None:
            group_assignment = group_assignment_lib.GroupAssignment(
                group_assignment
            )
        self._reducers = reducer_lib.ReducerOfEachFunction(
            communication_lib.checked(communication)
        )
        # A loss that is chosen by shapes has Keras's default reduction.
        own_name = "crossentropy" if checked is None else checked.name
        super().__init__(name=name or own_name)
        if checked is not None:
            self.reduction = checked.reduction
        self._given_loss = loss
        self._checked_loss = checked
        self._group_assignment = group_assignment

    @property
    def loss(self) -> Any:
        """The loss as given."""
        return self._given_loss

    @property
    def group_assignment(self) -> group_assignment_lib.GroupAssignment | None:
        """The groups as given; None for one group of all replicas."""
        return self._group_assignment

    @autograph.entry_point
    def __call__(
        self, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> Any:
        """Returns the mean over the group's items, divided as in Keras.

        The value is the same on all replicas of a group. As with Keras's
        losses, it is divided by the number of replicas, except on one device.
        """
        loss = self._checked_loss or keras_losses.resolved(
            self._given_loss, y_true, y_pred
        )
        if tf.distribute.in_cross_replica_context():
            # Keras calls losses here to find out their shapes.
            return loss(y_true, y_pred, sample_weight)
        site = site_lib.current()
        is_sum = loss.reduction == "sum"
        how = loss.reduction if site.num_replicas == 1 else "sum"
        # A name that users chose need not be one of a scope, such as "_loss".
        with tf.name_scope("GlobalMean"):
            own = keras_losses.evaluated(
                loss, how, y_true, y_pred, sample_weight
            )
            groups = self._groups(site)
            if site.num_replicas == 1:
                value, scale, num_items = own.value, 1.0, own.num_items
            else:
                total, num_items = self._summed(
                    [own.value, own.num_items], site, groups
                )
                divisor = tf.ones_like(total) if is_sum else num_items
                # The optimizer undoes 1/N and takes the mean over the group,
                # whose size is g. A loss that is a sum is not divided, but the
                # optimizer does the same.
                value = tf.math.divide_no_nan(total, divisor)
                value /= site.num_replicas
                scale = tf.math.divide_no_nan(
                    tf.cast(groups.group_size / site.num_replicas, total.dtype),
                    divisor,
                )
            return self._recorded(
                own.value,
                value,
                scale,
                loss_records.LossRecord(
                    self.name,
                    groups,
                    None if is_sum else num_items,
                    None if is_sum else own.num_rows,
                    site_lib.function_graph(),
                    site_lib.outermost_graph(),
                ),
                site,
            )

    def _groups(
        self, site: site_lib.Site
    ) -> group_assignment_lib.GroupAssignment:
        return group_assignment_lib.for_replicas(
            self._group_assignment,
            site.num_replicas,
            f"the strategy {type(site.strategy).__name__}",
        )

    def _summed(
        self,
        numbers: Sequence[tf.Tensor],
        site: site_lib.Site,
        groups: group_assignment_lib.GroupAssignment,
    ) -> list[tf.Tensor]:
        """Sums scalars over this replica's group, with one all-reduce."""
        if groups.group_size == 1:
            return list(numbers)
        channel = self._reducers.current().channel(groups).exact()
        transport = collectives.transport_for(site, channel)
        # A tower may compute its loss on another device.
        with (
            tf.device(site.device or None),
            recorder.labelled("loss", counts=[0]),
        ):
            [total] = transport.sum([tf.stop_gradient(tf.stack(numbers))])
        return tf.unstack(total)

    def _recorded(
        self,
        own: tf.Tensor,
        value: tf.Tensor,
        scale: tf.Tensor | float,
        record: loss_records.LossRecord,
        site: site_lib.Site,
    ) -> tf.Tensor:
        """Returns `value`, whose gradient by `own` is `scale`."""

        def gradient(upstream: tf.Tensor) -> list[tf.Tensor]:
            loss_records.add(record, site)
            return [upstream * scale]

        [result] = custom_gradient.with_gradient(
            [tf.stop_gradient(value)], [own], gradient
        )
        return result

    def communicate_as_in_a_call(self, site: site_lib.Site) -> None:
        """Repeats the sum of a call of the loss, for a communication plan.

        Args:
          site: The site that traces the step.
        """
        if site.num_replicas > 1:
            zero = tf.zeros([], (self._checked_loss or self).dtype)
            self._summed([zero, zero], site, self._groups(site))

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the losses of all items, before any reduction.

        Args:
          y_true: The labels, a tensor.
          y_pred: The predictions, a tensor.

        Returns:
          A tensor.
        """
        loss = self._checked_loss or keras_losses.resolved(
            self._given_loss, y_true, y_pred
        )
        return loss.call(y_true, y_pred)

    def get_config(self) -> dict:
        """Returns the arguments, for serialization."""
        groups = self._group_assignment
        return {
            "loss": keras.saving.serialize_keras_object(self._given_loss),
            "group_assignment": groups and groups.to_list(),
            "communication": self._reducers.communication.get_config(),
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: Mapping) -> GlobalMean:
        """Creates a loss from the dict of `get_config`.

        Args:
          config: The dict.
        """
        return cls(
            keras.saving.deserialize_keras_object(config["loss"]),
            config["group_assignment"],
            communication=communication_lib.Communication(
                **config["communication"]
            ),
            name=config["name"],
        )


def refuse_beside_other_losses(losses: Sequence[keras.losses.Loss]) -> None:
    """Raises ValueError if only some of a round's losses are a GlobalMean."""
    # The losses of a custom `train_step` are not known here.
    others = [one.name for one in losses if not isinstance(one, GlobalMean)]
    if others and len(others) < len(losses):
        names = [one.name for one in losses if isinstance(one, GlobalMean)]
        raise ValueError(
            f"The losses {names} are a GlobalMean and {others} are not, but a"
            " TowerOptimizer needs one kind of loss, since it weights each call"
            " of a round by its number of items. Wrap all of them, or none."
        )


def _checked(loss: Any) -> keras.losses.Loss | None:
    """Converts a loss; returns None for a loss that shapes choose."""
    if isinstance(loss, str) and loss.lower() in _CHOSEN_BY_SHAPE:
        return None
    if not callable(loss) and not isinstance(loss, str):
        raise TypeError(
            "GlobalMean takes a loss as compile() does: a name, a function or a"
            f" keras.losses.Loss, got {loss!r}. For several outputs, wrap the"
            " loss of each output."
        )
    found = keras_losses.resolved(loss)
    if isinstance(found, (GlobalMean, scalar_loss.ScalarLoss)):
        raise ValueError(
            f"GlobalMean can't wrap {type(found).__name__}({found.name}). Pass"
            f" the loss that {type(found).__name__} wraps. It must return a"
            " value for each row."
        )
    if found.reduction not in (*_MEANS, "sum"):
        raise ValueError(
            f"GlobalMean({found.name}): the loss has the reduction"
            f" {found.reduction!r}, so Keras does not combine its rows. Use"
            f" one of the reductions {[*_MEANS, 'sum']}."
        )
    return found
