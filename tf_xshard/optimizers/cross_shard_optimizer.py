"""CrossShardOptimizer: combine gradients over groups of replicas, apply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard import communication as communication_lib
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard.distribute import indexed_slices
from tf_xshard.distribute import replica_context
from tf_xshard.optimizers import inner_update
from tf_xshard.optimizers import tree
from tf_xshard.optimizers import wrapper
from tf_xshard.private import tensorflow as private_tensorflow
from tf_xshard.reduction import group_sum as reduction_lib
from tf_xshard.reduction import loss_scaling

# The values of tf.compat.v1.losses.Reduction, which the original takes.
_REDUCTIONS = {
    "mean": "mean",
    "sum": "sum",
    tf.compat.v1.losses.Reduction.MEAN: "mean",
    tf.compat.v1.losses.Reduction.SUM: "sum",
}

GradientFunction = Callable[[list[tuple]], Sequence[tuple]]


class ReducingOptimizer(wrapper.OptimizerWrapper):
    """A wrapper that reduces over groups of replicas, and how it does.

    Args:
      inner_optimizer: A Keras optimizer.
      reduction: See `CrossShardOptimizer`.
      group_assignment: See `CrossShardOptimizer`.
      communication: See `CrossShardOptimizer`.
      **kwargs: Arguments of `OptimizerWrapper`.
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        reduction: str,
        group_assignment,
        communication: communication_lib.Communication | None,
        **kwargs: Any,
    ):
        reduction = checked_reduction(reduction)
        group_assignment, communication = checked_communication(
            group_assignment, communication
        )
        super().__init__(inner_optimizer, **kwargs)
        self._reduction = reduction
        self._group_assignment = group_assignment
        self._communication = communication

    @property
    def reduction(self) -> str:
        """`"mean"` or `"sum"`."""
        return self._reduction

    @property
    def group_assignment(self) -> group_assignment_lib.GroupAssignment | None:
        """The groups, or None for one group of all replicas."""
        return self._group_assignment

    @property
    def communication(self) -> communication_lib.Communication:
        """How gradients travel between replicas."""
        return self._communication

    def get_config(self) -> dict:
        """The arguments, for serialization.

        Returns:
          A dict for `from_config`.
        """
        groups = self._group_assignment
        return {
            **super().get_config(),
            "reduction": self._reduction,
            "group_assignment": groups and groups.to_list(),
            "communication": self._communication.get_config(),
        }


@keras.saving.register_keras_serializable("tf_xshard")
class CrossShardOptimizer(ReducingOptimizer):
    """Combines gradients over groups of replicas; the inner optimizer applies.

    Use it to train on several replicas exactly as one device with the global
    batch would, or to train groups of replicas apart from each other
    (ensembles, populations, teams). Do not use it under
    ParameterServerStrategy, whose workers are not in step.

    ```
    group_assignment=[[0, 1], [2, 3]], reduction="mean"

    replica                  0             1             2             3
    own gradient             g0            g1            g2            g3
    pre_reduce          f(g0)         f(g1)         f(g2)         f(g3)
    group reduction     (g0+g1)/2     (g0+g1)/2     (g2+g3)/2     (g2+g3)/2
    post_reduce, inner  the same step on 0 and 1,   the same step on 2 and 3
    weights                  w             w             v             v
    ```

    The gradients are reduced once: what the inner optimizer does (clipping,
    weight decay, moving averages, accumulation, loss scaling) it does to the
    reduced gradient, on each replica, and sums no more.

    Args:
      inner_optimizer: A `keras.optimizers.Optimizer` that gets the reduced
        gradients. Made in the same strategy scope. It belongs to the wrapper
        from then on and no longer reduces by itself.
      reduction: `"mean"` (default) or `"sum"` of the losses of a group's
        replicas. The constants of `tf.compat.v1.losses.Reduction` are accepted.
      group_assignment: A `GroupAssignment`, or a `[num_groups,
        replicas_per_group]` nested list of replica ids. None (default) for one
        group of all replicas. With several groups the variables of different
        groups are meant to differ, and TensorFlow shows and saves those of
        replica 0 only.
      loss_normalization: What the loss that was differentiated was divided by.
        `"global"`: by the number of replicas, as `fit`, `keras.losses` objects
        under a strategy and `tf.nn.compute_average_loss` do. `"replica"`: by
        nothing, each replica's loss is its own mean. None (default) is
        `"global"`, or what another wrapper in the stack says.
      pre_reduce: A callable on a list of (gradient, variable) pairs, before the
        reduction, on each replica's own gradients; it returns a list of pairs
        for the same variables. None (default) does nothing. See
        `tf_xshard.clip_by_global_norm`. Gradients come unscaled (1/N undone,
        the loss scale of an inner `LossScaleOptimizer` divided out), 16-bit
        ones as float32.
      post_reduce: The same, on the reduced gradients.
      communication: A `Communication`. None (default) for its defaults.
      name: The optimizer's name.

    Raises:
      TypeError: If an argument has a wrong type; for a TF1 or other optimizer
        as `inner_optimizer`.
      ValueError: If an argument has a wrong value, if `group_assignment` is for
        another number of replicas than the strategy has, for an argument that
        belongs on the inner optimizer, and under a strategy that is not
        supported.

    Example:

    >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Input((3,)),
    ...                               keras.layers.Dense(1)])
    ...     model.compile(loss="mse", optimizer=tf_xshard.CrossShardOptimizer(
    ...         keras.optimizers.Adam(0.01)))
    >>> history = model.fit(np.ones([8, 3]), np.ones([8, 1]), verbose=0)

    Limits: replicas' shards of a batch should have equal size for `"mean"` to
    be the mean over the global batch; `keras.layers.BatchNormalization` keeps
    statistics of each replica's own shard, and Dropout masks are equal on all
    replicas, as Keras has it.

    Source: `tf.compat.v1.tpu.CrossShardOptimizer`.
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        reduction: str = "mean",
        group_assignment: (
            group_assignment_lib.GroupAssignment | Sequence | np.ndarray | None
        ) = None,
        *,
        loss_normalization: str | None = None,
        pre_reduce: GradientFunction | None = None,
        post_reduce: GradientFunction | None = None,
        communication: communication_lib.Communication | None = None,
        name: str = "CrossShardOptimizer",
        **kwargs: Any,
    ):
        for argument, function in (
            ("pre_reduce", pre_reduce),
            ("post_reduce", post_reduce),
        ):
            if function is not None and not callable(function):
                raise TypeError(
                    f"{argument} must be a callable on a list of (gradient,"
                    f" variable) pairs, got {function!r}. See"
                    " tf_xshard.clip_by_global_norm."
                )
        super().__init__(
            inner_optimizer,
            reduction,
            group_assignment,
            communication,
            loss_normalization=loss_normalization,
            name=name,
            **kwargs,
        )
        self._pre_reduce = pre_reduce
        self._post_reduce = post_reduce
        self._set_untracked("_known_patterns", {})

    def _step(self, gradients, variables, here: replica_context.Here) -> None:
        groups = groups_for(self._group_assignment, here.num_replicas)
        arriving = self._arriving_divisor(here)
        gradients = reduction_lib.standardized(gradients, variables)
        scales_loss = tree.has_loss_scale_optimizer(self.inner_optimizer)
        finite = loss_scaling.all_finite(gradients) if scales_loss else None
        if self._pre_reduce is not None:
            gradients = self._call("pre_reduce", gradients, variables, arriving)
        gradients = reduction_lib.group_sum(
            gradients,
            variables,
            here=here,
            groups=groups,
            communication=self._communication,
            known_patterns=self._known_patterns,
        )
        size = groups.group_size
        factor = arriving / (size if self._reduction == "mean" else 1)
        gradients = [
            reduction_lib.scaled(
                g, 1 / size if inner_update.is_overwritten(v) else factor
            )
            for g, v in zip(gradients, variables, strict=True)
        ]
        if self._post_reduce is not None:
            gradients = self._call("post_reduce", gradients, variables, 1)
        if scales_loss:
            finite = loss_scaling.finite_everywhere(
                tf.logical_and(finite, loss_scaling.all_finite(gradients)),
                here,
                self._communication,
            )
            gradients = loss_scaling.poisoned_unless(finite, gradients)
        inner_update.apply(self.inner_optimizer, gradients, variables)

    def _call(self, argument, gradients, variables, multiplier) -> list:
        """Lets a user's function see unscaled gradients."""
        loss_scale = self.inner_optimizer.scale_loss(1.0)

        def unscaled(values):
            if values.dtype.size < 4:
                values = tf.cast(values, tf.float32)
            factor = tf.cast(multiplier / loss_scale, values.dtype)
            return values * factor

        def scaled_again(values, dtype):
            factor = tf.cast(loss_scale / multiplier, values.dtype)
            return tf.cast(values * factor, dtype)

        present = [
            i
            for i, (g, v) in enumerate(zip(gradients, variables, strict=True))
            if g is not None and not inner_update.is_overwritten(v)
        ]
        given = [
            (
                indexed_slices.map_values(unscaled, gradients[i]),
                variables[i],
            )
            for i in present
        ]
        function = private_tensorflow.as_called_by_user(
            getattr(self, f"_{argument}")
        )
        taken = [tuple(pair) for pair in function(list(given))]
        if len(taken) != len(given) or any(
            len(pair) != 2 or pair[1] is not variable
            for pair, (_, variable) in zip(taken, given, strict=False)
        ):
            raise ValueError(
                f"{argument} must return (gradient, variable) pairs for the"
                f" {len(given)} variables that it was given, in their order; it"
                f" returned {len(taken)} that do not match."
            )
        result = list(gradients)
        for i, (gradient, _) in zip(present, taken, strict=True):
            result[i] = indexed_slices.map_values(
                lambda values, i=i: scaled_again(values, gradients[i].dtype),
                gradient,
            )
        return result

    def _what_a_save_loses(self) -> str | None:
        groups = self._group_assignment
        if groups is None or groups.num_groups == 1:
            return None
        return f"trains {groups.num_groups} groups, whose variables differ."

    def get_config(self) -> dict:
        """The arguments, for serialization.

        Returns:
          A dict for `from_config`.

        Example:

        >>> optimizer = tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(),
        ...                                           "sum", [[0]])
        >>> config = optimizer.get_config()
        >>> config["reduction"], config["group_assignment"]
        ('sum', [[0]])
        """
        return {
            **super().get_config(),
            "pre_reduce": _serialized(self._pre_reduce),
            "post_reduce": _serialized(self._post_reduce),
        }


def checked_reduction(reduction) -> str:
    """`"mean"` or `"sum"`, of what users may give.

    Raises:
      ValueError: For anything else.
    """
    if not isinstance(reduction, str) or reduction not in _REDUCTIONS:
        raise ValueError(
            f'reduction must be "mean" or "sum", got {reduction!r}.'
        )
    return _REDUCTIONS[reduction]


def checked_communication(group_assignment, communication) -> tuple:
    """A `GroupAssignment` or None, and a `Communication`.

    Raises:
      TypeError, ValueError: If they are none, or the groups are not for the
        strategy in whose scope this is called.
    """
    if group_assignment is not None:
        group_assignment = group_assignment_lib.GroupAssignment(
            group_assignment
        )
    if communication is None:
        communication = communication_lib.Communication()
    elif not isinstance(communication, communication_lib.Communication):
        raise TypeError(
            "communication must be a tf_xshard.Communication, got"
            f" {communication!r}."
        )
    if tf.distribute.has_strategy():
        groups_for(
            group_assignment,
            tf.distribute.get_strategy().num_replicas_in_sync,
        )
    return group_assignment, communication


def groups_for(
    groups: group_assignment_lib.GroupAssignment | None, num_replicas: int
) -> group_assignment_lib.GroupAssignment:
    """The groups, or one of all replicas.

    Raises:
      ValueError: If they are for another number of replicas.
    """
    if groups is None:
        return group_assignment_lib.GroupAssignment.contiguous(
            num_replicas, num_replicas
        )
    if groups.num_replicas != num_replicas:
        raise ValueError(
            f"group_assignment {groups.to_list()} is for"
            f" {groups.num_replicas} replicas, and the strategy"
            f" {type(tf.distribute.get_strategy()).__name__} has"
            f" {num_replicas}. Give one for {num_replicas} (a saved model:"
            " load it with compile=False and compile it anew), and use the"
            " optimizer under the strategy that it was written for."
        )
    return groups


def _serialized(function):
    if function is None:
        return None
    return keras.saving.serialize_keras_object(function)
