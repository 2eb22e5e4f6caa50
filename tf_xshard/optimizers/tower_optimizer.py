"""TowerOptimizer: collect gradients of several towers, apply them once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard.distribute import indexed_slices
from tf_xshard.distribute import replica_context
from tf_xshard.distribute import replica_variables
from tf_xshard.optimizers import accumulation
from tf_xshard.optimizers import cross_shard_optimizer
from tf_xshard.optimizers import inner_update
from tf_xshard.optimizers import tree
from tf_xshard.optimizers import wrapper
from tf_xshard.private import tensorflow as private_tensorflow
from tf_xshard.reduction import group_sum as reduction_lib


@keras.saving.register_keras_serializable("tf_xshard")
class TowerOptimizer(wrapper.OptimizerWrapper):
    """Collects the gradients of several towers; the last one applies them.

    Each call of `apply` or `apply_gradients` is one tower's contribution. The
    call that completes `num_towers` hands the mean (or sum) to the inner
    optimizer, which updates once. In `fit` that is gradient accumulation, which
    works in a `tf.function` under every supported strategy, and communicates
    once per `num_towers` batches.

    ```
    num_towers=3, reduction="mean"

    call                 1          2          3                      4 ...
    gradient             a          b          c
    accumulator          a          a + b      0
    inner optimizer                            applies (a + b + c) / 3
    iterations           0          0          1
    ```

    What is set on the inner optimizer (clipping, moving averages, weight decay,
    schedules, loss scaling) acts on the aggregated gradient and counts updates.
    With a `LossScaleOptimizer` inside, an overflow in any tower of any replica
    makes all replicas skip the whole round.

    A round that is not complete at the end of `fit` is kept for the next one,
    and survives saving and loading; `reset` drops it.

    Args:
      optimizer_or_optimizer_fn: A `keras.optimizers.Optimizer`, or a callable
        without arguments that returns one, which is called once. If no
        tf_xshard optimizer is inside, a `CrossShardOptimizer` is put around it.
      num_towers: How many calls make one update, an int of at least 1.
      reduction: `"mean"` (default) or `"sum"` of the towers' losses.
      loss_normalization: See `CrossShardOptimizer`.
      name: The optimizer's name.

    Raises:
      TypeError: If an argument has a wrong type.
      ValueError: If an argument has a wrong value, belongs on the inner
        optimizer, or the strategy is not supported.

    Example:

    >>> optimizer = tf_xshard.TowerOptimizer(keras.optimizers.SGD(1.0),
    ...                                      num_towers=2)
    >>> weight = keras.Variable(10.0)
    >>> optimizer.apply([tf.constant(1.0)], [weight])
    >>> float(weight)
    10.0
    >>> optimizer.apply([tf.constant(3.0)], [weight])
    >>> float(weight), int(optimizer.iterations)
    (8.0, 1)

    Limits: a variable that had a gradient in an earlier round and has none in
    all calls of this one counts as zero; one that is frozen in mid-round loses
    what the round had for it. Accumulators take the memory of the trainable
    variables. tf.train.Checkpoint and files keep the mean of the
    replicas' accumulators, so with several groups an open round is mixed.

    Source: `tf.contrib.estimator.TowerOptimizer` (TensorFlow 1.14).
    """

    def __init__(
        self,
        optimizer_or_optimizer_fn: (
            keras.optimizers.Optimizer
            | Callable[[], keras.optimizers.Optimizer]
        ),
        num_towers: int,
        reduction: str = "mean",
        *,
        loss_normalization: str | None = None,
        name: str = "TowerOptimizer",
        **kwargs: Any,
    ):
        if isinstance(num_towers, bool) or not isinstance(num_towers, int):
            raise TypeError(f"num_towers must be an int, got {num_towers!r}.")
        if num_towers < 1:
            raise ValueError(f"num_towers must be positive, got {num_towers}.")
        reduction = cross_shard_optimizer.checked_reduction(reduction)
        inner = optimizer_or_optimizer_fn
        if callable(inner) and not isinstance(
            inner, (keras.optimizers.Optimizer, tf.compat.v1.train.Optimizer)
        ):
            inner = private_tensorflow.as_called_by_user(inner)()
        if isinstance(inner, keras.optimizers.Optimizer) and not any(
            tree.is_wrapper(one) for one in tree.descendants(inner)
        ):
            inner = cross_shard_optimizer.CrossShardOptimizer(inner)
        super().__init__(
            inner, loss_normalization=loss_normalization, name=name, **kwargs
        )
        self._num_towers = num_towers
        self._reduction = reduction
        self._set_untracked("_seen", accumulation.SeenVariables(name))

    @property
    def num_towers(self) -> int:
        """How many calls make one update."""
        return self._num_towers

    @property
    def reduction(self) -> str:
        """`"mean"` or `"sum"`."""
        return self._reduction

    def _build_inner(self, variables) -> None:
        super()._build_inner(variables)
        if self._num_towers == 1:
            return
        self._tower = replica_variables.make((), "int32", "tower")
        self._accumulators = [
            replica_variables.accumulator_of(
                variable,
                f"{replica_variables.flat_name(variable)}_accumulator",
            )
            for variable in variables
        ]
        # Rows of an embedding that a round has touched.
        self._touched = [
            replica_variables.make(
                variable.shape[:1],
                "float32",
                f"{replica_variables.flat_name(variable)}_touched",
            )
            for variable in variables
        ]

    def _step(self, gradients, variables, here: replica_context.Here) -> None:
        gradients = reduction_lib.standardized(gradients, variables)
        if self._num_towers == 1:
            self._hand_over(gradients, variables, here, 1)
            return
        indices = [self._index(variable) for variable in variables]
        self._collect(gradients, indices)
        count = replica_variables.read(self._tower) + 1
        # More, if an open round of more towers was loaded.
        is_last = count >= self._num_towers
        replica_variables.assign(
            self._tower, tf.where(is_last, tf.zeros_like(count), count)
        )
        replica_variables.when(
            is_last, lambda: self._complete(indices, count, here)
        )

    @private_tensorflow.entry_point
    def apply_towers(
        self, towers: Sequence[Sequence], trainable_variables=None
    ) -> None:
        """Applies a whole round at once.

        The same as `num_towers` calls of `apply`, without accumulators in
        between: for towers that are computed in one step, such as on several
        devices of one replica.

        Args:
          towers: A list of gradients for each tower, `num_towers` of them.
          trainable_variables: The variables they belong to. None (default) for
            those that the optimizer was built with.

        Raises:
          ValueError: If there is another number of towers; see `apply` for the
            rest.
          tf.errors.InvalidArgumentError: If a round is open. (Not on TPUs and
            with `jit_compile=True`: XLA has no assertions, and the open round
            stays as it is.)

        Example:

        >>> optimizer = tf_xshard.TowerOptimizer(keras.optimizers.SGD(1.0), 2)
        >>> weight = keras.Variable(10.0)
        >>> optimizer.apply_towers([[tf.constant(1.0)], [tf.constant(3.0)]],
        ...                        [weight])
        >>> float(weight)
        8.0
        """
        towers = [list(gradients) for gradients in towers]
        if len(towers) != self._num_towers:
            raise ValueError(
                f"{self.name} has {self._num_towers} towers, got gradients of"
                f" {len(towers)}."
            )
        variables = [self._prepare(g, trainable_variables) for g in towers][0]
        here = replica_context.current()
        self._check_strategy(here.strategy)
        with tf.name_scope(self.name):
            towers = [
                [
                    indexed_slices.map_values(_widened, gradient)
                    for gradient in reduction_lib.standardized(g, variables)
                ]
                for g in towers
            ]
            summed = [
                indexed_slices.added(column, variable)
                for column, variable in zip(
                    zip(*towers, strict=True), variables, strict=True
                )
            ]
            with tf.control_dependencies(self._refuse_open_round()):
                self._hand_over(summed, variables, here, self._num_towers)

    def _refuse_open_round(self) -> list:
        """What has to run before an update, in a graph."""
        if self._num_towers == 1:
            return []
        check = tf.debugging.assert_equal(
            replica_variables.read(self._tower),
            0,
            "apply_towers() is called while a round of apply() is open."
            " Complete it, or call reset().",
        )
        return [] if check is None else [check]

    def _collect(self, gradients, indices) -> None:
        for gradient, index in zip(gradients, indices, strict=True):
            if gradient is None:
                continue
            variable = self._trainable_variables[index]
            is_sparse = isinstance(gradient, tf.IndexedSlices)
            self._seen.add(
                index, replica_variables.flat_name(variable), is_sparse
            )
            replica_variables.add(self._accumulators[index], gradient)
            if is_sparse:
                replica_variables.add(
                    self._touched[index],
                    tf.IndexedSlices(
                        tf.ones_like(gradient.indices, tf.float32),
                        gradient.indices,
                    ),
                )

    def _complete(self, indices, count, here) -> None:
        """Applies what has been collected, of this and earlier calls."""
        self._seen.used()
        sums, variables = [], []
        for index, variable in enumerate(self._trainable_variables):
            is_frozen = not getattr(variable, "trainable", True)
            if index in self._seen:
                total = self._taken(index)
            elif index in indices:
                total = None
            else:
                continue
            if index in indices or not is_frozen:
                sums.append(total)
                variables.append(variable)
        self._hand_over(sums, variables, here, count)

    def _taken(self, index):
        """An accumulator's content, which is zero after it."""
        accumulator = self._accumulators[index]
        total = replica_variables.read(accumulator)
        if self._seen.is_sparse(index):
            touched = self._touched[index]
            rows = tf.reshape(
                tf.where(replica_variables.read(touched) > 0), [-1]
            )
            total = tf.IndexedSlices(
                tf.gather(total, rows),
                rows,
                tf.constant(list(accumulator.shape), tf.int64),
            )
            replica_variables.assign(touched, tf.zeros(touched.shape))
        replica_variables.assign(
            accumulator, tf.zeros(accumulator.shape, accumulator.dtype)
        )
        return total

    def _hand_over(self, sums, variables, here, num_towers) -> None:
        """Gives the inner optimizer what so many towers have added up."""
        arriving = self._arriving_divisor(here)
        is_mean = self._reduction == "mean"
        handed_over = []
        for total, variable in zip(sums, variables, strict=True):
            # A statistic of the replica is no gradient of its loss.
            is_statistic = inner_update.is_overwritten(variable)

            def scale(values, dtype=variable.dtype, is_statistic=is_statistic):
                factor = 1 if is_statistic else arriving
                if is_mean or is_statistic:
                    factor /= (
                        tf.cast(num_towers, values.dtype)
                        if tf.is_tensor(num_towers)
                        else num_towers
                    )
                return tf.cast(reduction_lib.scaled(values, factor), dtype)

            handed_over.append(indexed_slices.map_values(scale, total))
        self.inner_optimizer.apply(handed_over, variables)

    def _index(self, variable) -> int:
        return self._trainable_variables_indices[self._var_key(variable)]

    def reset(self) -> None:
        """Drops the open round, on all replicas.

        Call it outside of `strategy.run`.

        Raises:
          RuntimeError: In replica context of a strategy.

        Example:

        >>> optimizer = tf_xshard.TowerOptimizer(keras.optimizers.SGD(1.0), 2)
        >>> weight = keras.Variable(10.0)
        >>> optimizer.apply([tf.constant(100.0)], [weight])
        >>> optimizer.reset()
        >>> for gradient in (1.0, 3.0):
        ...     optimizer.apply([tf.constant(gradient)], [weight])
        >>> float(weight)
        8.0
        """
        replica_context.refuse_replica_context(f"{self.name}.reset()")
        for variable in self._own_variables:
            variable.assign(tf.zeros(variable.shape, variable.dtype))

    def get_config(self) -> dict:
        """The arguments, for serialization.

        Returns:
          A dict for `from_config`.

        Example:

        >>> tf_xshard.TowerOptimizer(keras.optimizers.SGD(), 4).get_config()[
        ...     "num_towers"]
        4
        """
        config = super().get_config()
        config["optimizer_or_optimizer_fn"] = config.pop("inner_optimizer")
        return {
            **config,
            "num_towers": self._num_towers,
            "reduction": self._reduction,
        }


def _widened(values):
    """float32 for 16-bit numbers, whose sums would lose digits or overflow."""
    return tf.cast(values, tf.float32) if values.dtype.size < 4 else values
